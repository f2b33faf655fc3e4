/* A stand-in for libnvidia-ml.so.1: two GPUs, of which the second is lost. STANDIN_NVML picks:
   "no_module" = library without kernel module, "hang" = a call that never returns. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
struct utilization { unsigned gpu, memory; };
struct memory { unsigned long long total, free, used; };

static int gpus[2] = {0, 1};
static int mode_is(const char *name) {
    const char *mode = getenv("STANDIN_NVML");
    return mode && !strcmp(mode, name);
}
static int lost(void *device) { return device == &gpus[1]; }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return mode_is("no_module") ? DRIVER_NOT_LOADED : SUCCESS;
}
int nvmlShutdown(void) { return SUCCESS; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    strncpy(out, "580.95.05", size);
    return SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 2;
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = &gpus[index];
    return SUCCESS;
}
int nvmlDeviceGetUUID(void *device, char *out, unsigned size) {
    strncpy(out, lost(device) ? "GPU-lost" : "GPU-well", size);
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(void *device, struct utilization *out) {
    while (mode_is("hang")) sleep(1);
    out->gpu = 87;
    out->memory = 12;
    return lost(device) ? GPU_IS_LOST : SUCCESS;
}
int nvmlDeviceGetMemoryInfo(void *device, struct memory *out) {
    out->total = 80ULL << 30;
    out->used = 77ULL << 30;
    out->free = 3ULL << 30;
    return lost(device) ? GPU_IS_LOST : SUCCESS;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    *milliwatts = 412500;
    return lost(device) ? GPU_IS_LOST : SUCCESS;
}
/* No nvmlDeviceGetTemperatureV: a driver that is older than the bindings. */
int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *celsius) {
    (void)sensor;
    *celsius = 61;
    return lost(device) ? GPU_IS_LOST : SUCCESS;
}
