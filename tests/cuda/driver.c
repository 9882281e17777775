/* As much of libcuda.so and libnvrtc.so as the kernels need, on a CPU: memory is the process's, streams are done at once, and
 * a launch runs the kernel of that name, compiled from the same source, for every thread of the grid. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

Index blockIdx, threadIdx, blockDim, gridDim;

enum { OK = 0, INVALID_VALUE = 1, NO_DEVICE = 100, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719, UNSUPPORTED = 801 };

/* ---- what a test sets and reads ---- */

static int version = 12040, devices = 1, capability = 90;
static unsigned long long launches, compilations;
static char last_kernel[64];

void fake_version(int value) { version = value; }
void fake_devices(int value) { devices = value; }
void fake_capability(int value) { capability = value; }
/* From now on every launch and every wait answers this, as after an error that stays. 0 is a new process. */
static int lost;
void fake_lost(int value) { lost = value; }
unsigned long long fake_launches(void) { return launches; }
unsigned long long fake_compilations(void) { return compilations; }
const char *fake_last_kernel(void) { return last_kernel; }

/* ---- memory ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
typedef struct { unsigned long long start, end; } Range;
/* By their start. No two overlap. */
static Range *ranges;
static size_t known, room;
static int faults;
unsigned long long generation = 1;

/* How many start at or below an address. */
static size_t below(unsigned long long address)
{
    size_t from = 0, to = known;
    while (from < to) {
        size_t middle = (from + to) / 2;
        if (ranges[middle].start <= address)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

void *checked(Seen *seen, unsigned long long address, size_t bytes)
{
    static char nowhere[64] __attribute__((aligned(64)));
    size_t at = below(address);
    if (address % bytes == 0 && at > 0 && address + bytes <= ranges[at - 1].end) {
        *seen = (Seen){ranges[at - 1].start, ranges[at - 1].end, generation};
        return (void *)address;
    }
    faults++;
    memset(nowhere, 0, sizeof nowhere);
    return nowhere;
}

/* Makes memory one that kernels may touch. */
static int note(unsigned long long start, size_t bytes)
{
    pthread_mutex_lock(&lock);
    size_t at = below(start);
    int free = (at == 0 || ranges[at - 1].end <= start) && (at == known || start + bytes <= ranges[at].start);
    if (free && known == room) {
        room = 2 * room + 64;
        ranges = realloc(ranges, room * sizeof *ranges);
    }
    if (free) {
        memmove(ranges + at + 1, ranges + at, (known - at) * sizeof *ranges);
        ranges[at] = (Range){start, start + bytes};
        known++;
        generation++;
    }
    pthread_mutex_unlock(&lock);
    return free ? OK : 712;
}

static int forget(unsigned long long start)
{
    pthread_mutex_lock(&lock);
    size_t at = below(start);
    int found = at > 0 && ranges[at - 1].start == start;
    if (found) {
        known--;
        memmove(ranges + at - 1, ranges + at, (known - at + 1) * sizeof *ranges);
        generation++;
    }
    pthread_mutex_unlock(&lock);
    return found ? OK : INVALID_VALUE;
}

static int allocate(void **memory, size_t bytes, size_t alignment)
{
    *memory = NULL;
    if (bytes == 0)
        return INVALID_VALUE;
    *memory = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    return *memory != NULL ? note((unsigned long long)*memory, bytes) : 2;
}

int cuMemAlloc_v2(unsigned long long *address, size_t bytes)
{
    void *memory;
    int result = allocate(&memory, bytes, 256);
    *address = (unsigned long long)memory;
    return result;
}

int cuMemFree_v2(unsigned long long address)
{
    int result = forget(address);
    if (result == OK)
        free((void *)address);
    return result;
}

int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) { return allocate(memory, bytes, 4096); }
int cuMemAllocHost_v2(void **memory, size_t bytes) { return allocate(memory, bytes, 4096); }
int cuMemFreeHost(void *memory) { return cuMemFree_v2((unsigned long long)memory); }
int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) { return note((unsigned long long)memory, bytes); }
int cuMemHostUnregister(void *memory) { return forget((unsigned long long)memory); }

int cuMemHostGetDevicePointer_v2(unsigned long long *address, void *memory, unsigned flags)
{
    *address = (unsigned long long)memory;
    pthread_mutex_lock(&lock);
    size_t at = below(*address);
    int found = at > 0 && *address < ranges[at - 1].end;
    pthread_mutex_unlock(&lock);
    return found ? OK : INVALID_VALUE;
}

int cuMemGetInfo_v2(size_t *free, size_t *total)
{
    *free = *total = 1 << 30;
    return OK;
}

int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes)
{
    memcpy((void *)to, from, bytes);
    return OK;
}

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes)
{
    memcpy(to, (void *)from, bytes);
    return OK;
}

int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void *stream)
{
    memcpy((void *)to, (void *)from, bytes);
    return OK;
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

int cuMemsetD8_v2(unsigned long long to, unsigned char value, size_t bytes)
{
    memset((void *)to, value, bytes);
    return OK;
}

int cuMemsetD32Async(unsigned long long to, unsigned value, size_t count, void *stream)
{
    for (size_t i = 0; i < count; i++)
        ((unsigned *)to)[i] = value;
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
int cuStreamSynchronize(void *stream) { return lost; }
int cuStreamQuery(void *stream) { return OK; }
int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) { function(data); return OK; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return OK; }
int cuEventCreate(void **event, unsigned flags) { *event = &something; return OK; }
int cuEventDestroy_v2(void *event) { return OK; }
int cuEventRecord(void *event, void *stream) { return OK; }
int cuEventQuery(void *event) { return OK; }
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

/* The files that list kernels. Each list ends with an entry without a name. */
extern const Kernel page_copy_kernels[], exact_kernels[], digest_kernels[];
static const Kernel *const lists[] = {page_copy_kernels, exact_kernels, digest_kernels};

/* The next kernel after one, over all lists. */
#define EACH_KERNEL(kernel)                                                                                            \
    for (size_t list = 0; list < sizeof lists / sizeof *lists; list++)                                                 \
        for (const Kernel *kernel = lists[list]; kernel->name != NULL; kernel++)

int cuModuleLoadData(void **module, const void *image)
{
    *module = &something;
    /* What the compiler below gives, or machine code of the real one. */
    return memcmp(image, "compiled", 8) == 0 || memcmp(image, "\177ELF", 4) == 0 ? OK : INVALID_VALUE;
}

int cuModuleUnload(void *module) { return OK; }

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    EACH_KERNEL(kernel)
        if (strcmp(kernel->name, name) == 0) {
            *function = (void *)kernel;
            return OK;
        }
    return NOT_FOUND;
}

int cuFuncSetAttribute(void *function, int attribute, int value) { return OK; }

int cuLaunchKernel(const Kernel *kernel, unsigned bx, unsigned by, unsigned bz, unsigned tx, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **parameters, void **extra)
{
    /* A process that is started with this variable loses its device at that launch. */
    const char *last = getenv("STAND_IN_LAUNCHES");
    if (last != NULL && launches >= strtoull(last, NULL, 10))
        lost = ILLEGAL_ADDRESS;
    if (lost != OK)
        return lost;
    if (bx == 0 || by == 0 || bz == 0 || bx > 0x7fffffff || by > 65535 || bz > 65535)
        return INVALID_VALUE;
    if (tx == 0 || ty == 0 || tz == 0 || tz > 64 || (unsigned long long)tx * ty * tz > 1024)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    faults = 0;
    gridDim = (Index){bx, by, bz};
    blockDim = (Index){tx, ty, tz};
    for (blockIdx.z = 0; blockIdx.z < bz; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < by; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < bx; blockIdx.x++)
                for (threadIdx.z = 0; threadIdx.z < tz; threadIdx.z++)
                    for (threadIdx.y = 0; threadIdx.y < ty; threadIdx.y++)
                        for (threadIdx.x = 0; threadIdx.x < tx; threadIdx.x++)
                            kernel->run(parameters);
    launches++;
    strncpy(last_kernel, kernel->name, sizeof last_kernel - 1);
    int result = faults == 0 ? OK : LAUNCH_FAILED;
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- the compiler ---- */

/* No version of the real one, which must not take what this one has compiled. */
int nvrtcVersion(int *major, int *minor) { *major = 12; *minor = 999; return OK; }
int nvrtcGetNumSupportedArchs(int *count) { *count = 2; return OK; }
int nvrtcGetSupportedArchs(int *list) { list[0] = 80; list[1] = 90; return OK; }
const char *nvrtcGetErrorString(int code) { return "an error of the stand-in"; }
int nvrtcDestroyProgram(void **program) { return OK; }

int nvrtcCompileProgram(void *program, int count, const char *const *options)
{
    compilations++;
    return count >= 1 ? OK : 1;
}

int nvrtcGetCUBINSize(void *program, size_t *size) { *size = 8; return OK; }
int nvrtcGetCUBIN(void *program, char *bytes) { memcpy(bytes, "compiled", 8); return OK; }
int nvrtcGetPTXSize(void *program, size_t *size) { *size = 9; return OK; }
int nvrtcGetPTX(void *program, char *text) { memcpy(text, "compiled", 9); return OK; }

int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *names)
{
    *program = &something;
    /* A source of which some kernel is known. */
    EACH_KERNEL(kernel)
        if (strstr(source, kernel->name) != NULL)
            return OK;
    return 1;
}
