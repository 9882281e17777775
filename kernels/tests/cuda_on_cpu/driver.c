/* As much of libcuda.so and libnvrtc.so as page copies need, on a CPU: memory is the process's, streams are done at once, and
 * a launch runs the kernel of that name, compiled from the same source, for every thread of the grid. */
#include "page_copy.cu"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

_Thread_local Index blockIdx, threadIdx;

enum { OK = 0, INVALID_VALUE = 1, NO_DEVICE = 100, NOT_FOUND = 500, LAUNCH_FAILED = 719, UNSUPPORTED = 801 };

/* ---- what a test sets and reads ---- */

static int version = 12040, devices = 1, capability = 90;
static unsigned long long launches;
static char last_kernel[64];

void fake_version(int value) { version = value; }
void fake_devices(int value) { devices = value; }
void fake_capability(int value) { capability = value; }
unsigned long long fake_launches(void) { return launches; }
const char *fake_last_kernel(void) { return last_kernel; }

/* ---- memory ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { unsigned long long start, end; } allocations[256];
static int faults;

void *checked(unsigned long long address, size_t bytes)
{
    static _Thread_local char nowhere[16] __attribute__((aligned(16)));
    if (address % bytes == 0)
        for (int i = 0; i < 256; i++)
            if (address >= allocations[i].start && address + bytes <= allocations[i].end)
                return (void *)address;
    faults++;
    return nowhere;
}

int cuMemAlloc_v2(unsigned long long *address, size_t bytes)
{
    pthread_mutex_lock(&lock);
    int free = 0;
    while (free < 256 && allocations[free].end != 0)
        free++;
    void *memory = free < 256 ? aligned_alloc(256, (bytes + 255) / 256 * 256) : NULL;
    if (memory != NULL) {
        *address = allocations[free].start = (unsigned long long)memory;
        allocations[free].end = allocations[free].start + bytes;
    }
    pthread_mutex_unlock(&lock);
    return memory != NULL ? OK : 2;
}

int cuMemFree_v2(unsigned long long address)
{
    pthread_mutex_lock(&lock);
    int found = 0;
    while (found < 256 && allocations[found].start != address)
        found++;
    if (found < 256)
        allocations[found].start = allocations[found].end = 0;
    pthread_mutex_unlock(&lock);
    free((void *)address);
    return found < 256 ? OK : INVALID_VALUE;
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *stream)
{
    memcpy((void *)to, from, bytes);
    return OK;
}

int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *stream)
{
    memcpy(to, (void *)from, bytes);
    return OK;
}

int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void *stream)
{
    memcpy((void *)to, (void *)from, bytes);
    return OK;
}

int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, void *stream)
{
    memset((void *)to, value, bytes);
    return OK;
}

/* ---- device, context, streams, events: there is one of each, and nothing to wait for ---- */

static char something;
static _Thread_local void *current;

int cuInit(unsigned flags) { return devices > 0 ? OK : NO_DEVICE; }
int cuDriverGetVersion(int *value) { *value = version; return OK; }
int cuDeviceGetCount(int *count) { *count = devices; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < devices ? OK : 101; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "none: a CPU", length); return OK; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 1 << 30; return OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &something; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
int cuCtxGetCurrent(void **context) { *context = current; return OK; }
int cuCtxSetCurrent(void *context) { current = context; return OK; }
int cuCtxSynchronize(void) { return OK; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = &something; return OK; }
int cuStreamDestroy_v2(void *stream) { return OK; }
int cuStreamSynchronize(void *stream) { return OK; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return OK; }
int cuEventCreate(void **event, unsigned flags) { *event = &something; return OK; }
int cuEventDestroy_v2(void *event) { return OK; }
int cuEventRecord(void *event, void *stream) { return OK; }
int cuEventSynchronize(void *event) { return OK; }
int cuEventElapsedTime(float *ms, void *from, void *to) { *ms = 1; return OK; }
int cuEventElapsedTime_v2(float *ms, void *from, void *to) { *ms = 1; return OK; }

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    switch (attribute) {
    case 75: *value = capability / 10; return OK;
    case 76: *value = capability % 10; return OK;
    default: *value = 0; return OK;
    }
}

int cuGetErrorName(int code, const char **text) { *text = "CUDA_ERROR"; return OK; }

int cuGetErrorString(int code, const char **text)
{
    *text = code == NO_DEVICE ? "no CUDA-capable device is detected" : "an error of the stand-in";
    return OK;
}

/* ---- modules and launches ---- */

typedef struct {
    const char *name;
    void (*run)(const PageCopy);
} Kernel;

static const Kernel kernels[] = {
    {"page_copy_16", page_copy_16}, {"page_copy_8", page_copy_8}, {"page_copy_4", page_copy_4},
    {"page_copy_2", page_copy_2},   {"page_copy_1", page_copy_1},
};

int cuModuleLoadData(void **module, const void *image)
{
    *module = &something;
    /* What the compiler below gives, or machine code of the real one. */
    return memcmp(image, "compiled", 8) == 0 || memcmp(image, "\177ELF", 4) == 0 ? OK : INVALID_VALUE;
}

int cuModuleUnload(void *module) { return OK; }

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (strcmp(kernels[i].name, name) == 0) {
            *function = (void *)&kernels[i];
            return OK;
        }
    return NOT_FOUND;
}

int cuLaunchKernel(const Kernel *kernel, unsigned blocks, unsigned by, unsigned bz, unsigned threads, unsigned ty,
                   unsigned tz, unsigned shared, void *stream, void **parameters, void **extra)
{
    if (by != 1 || bz != 1 || ty != 1 || tz != 1 || threads > THREADS || blocks == 0)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    faults = 0;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            kernel->run(*(const PageCopy *)parameters[0]);
    launches++;
    strncpy(last_kernel, kernel->name, sizeof last_kernel - 1);
    int result = faults == 0 ? OK : LAUNCH_FAILED;
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- the compiler ---- */

int nvrtcVersion(int *major, int *minor) { *major = 12; *minor = 0; return OK; }
int nvrtcGetNumSupportedArchs(int *count) { *count = 2; return OK; }
int nvrtcGetSupportedArchs(int *list) { list[0] = 80; list[1] = 90; return OK; }
const char *nvrtcGetErrorString(int code) { return "an error of the stand-in"; }
int nvrtcDestroyProgram(void **program) { return OK; }
int nvrtcCompileProgram(void *program, int count, const char *const *options) { return count >= 1 ? OK : 1; }
int nvrtcGetCUBINSize(void *program, size_t *size) { *size = 8; return OK; }
int nvrtcGetCUBIN(void *program, char *bytes) { memcpy(bytes, "compiled", 8); return OK; }
int nvrtcGetPTXSize(void *program, size_t *size) { *size = 9; return OK; }
int nvrtcGetPTX(void *program, char *text) { memcpy(text, "compiled", 9); return OK; }

int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names)
{
    *program = &something;
    return strstr(source, "page_copy_16") != NULL ? OK : 1;
}
