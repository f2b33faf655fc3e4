"""What people and Prometheus see; functions of state and journal that own nothing."""
