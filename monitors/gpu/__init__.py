"""GPU readings through NVML; a machine without a driver is not measured."""
