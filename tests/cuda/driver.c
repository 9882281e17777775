/* As much of libcuda.so and libnvrtc.so as the kernels need, on a CPU: memory is the process's, and a launch runs the kernel of
 * that name, compiled from the same source, for every thread of the grid.
 *
 * It is lazy: what is put into a stream is done when something waits for it and not before, so that a program that does not wait
 * finds memory as it was. In a process that is started with STAND_IN_COPY_US, a thread does it instead, and each copy and launch
 * takes so many microseconds, so that it is under way when a test looks.
 *
 * STAND_IN_LOST names a file in which a test writes ids of processes. Such a process loses its device: from then on each of its
 * calls that use the device answers CUDA_ERROR_ILLEGAL_ADDRESS, and nothing is done any more. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

Index blockIdx, threadIdx, blockDim, gridDim;

enum { OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, NO_DEVICE = 100, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
       ILLEGAL_ADDRESS = 700, REGISTERED_BEFORE = 712, LAUNCH_FAILED = 719, UNSUPPORTED = 801 };

/* Of all that follows but what a test sets and reads. The driver's functions take it, the others need it, unless they say that they
 * take it themselves. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int unlocked(int result)
{
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- what a test sets and reads ---- */

static int version = 12040, devices = 1, capability = 90;
static unsigned long long launches, compilations;
static char last_kernel[64];

void fake_version(int value) { version = value; }
void fake_devices(int value) { devices = value; }
void fake_capability(int value) { capability = value; }
/* From now on every launch and every wait answers this, as after an error that stays, and nothing is done any more. 0 is a new
 * process. */
static int lost;
void fake_lost(int value) { lost = value; }

/* ILLEGAL_ADDRESS once STAND_IN_LOST has named this process, else OK. */
static int of_device(void)
{
    static _Atomic int gone;
    const char *path = getenv("STAND_IN_LOST");
    FILE *file = gone || path == NULL ? NULL : fopen(path, "re");
    int process = 0;
    while (file != NULL && fscanf(file, "%d", &process) == 1)
        gone |= process == getpid();
    if (file != NULL)
        fclose(file);
    return gone ? ILLEGAL_ADDRESS : OK;
}

/* Begins each call that uses the device. */
#define DEVICE()                                                                                                       \
    do {                                                                                                               \
        if (of_device() != OK)                                                                                         \
            return ILLEGAL_ADDRESS;                                                                                    \
    } while (0)
/* The launch behind so many from now on is refused, once. Never if it is negative. */
static int refused_after = -1;
void fake_refused_after(int value) { refused_after = value; }
unsigned long long fake_launches(void) { return launches; }
unsigned long long fake_compilations(void) { return compilations; }
const char *fake_last_kernel(void) { return last_kernel; }

/* ---- memory ---- */

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

/* Whether the device reaches all of this. */
static int reaches(unsigned long long address, size_t bytes)
{
    size_t at = below(address);
    return at > 0 && bytes <= ranges[at - 1].end - ranges[at - 1].start && address <= ranges[at - 1].end - bytes;
}

/* Makes memory one that kernels may touch. */
static int note(unsigned long long start, size_t bytes)
{
    size_t at = below(start);
    if ((at > 0 && ranges[at - 1].end > start) || (at < known && start + bytes > ranges[at].start))
        return REGISTERED_BEFORE;
    if (known == room) {
        room = 2 * room + 64;
        ranges = realloc(ranges, room * sizeof *ranges);
    }
    memmove(ranges + at + 1, ranges + at, (known - at) * sizeof *ranges);
    ranges[at] = (Range){start, start + bytes};
    known++;
    generation++;
    return OK;
}

static int forget(unsigned long long start)
{
    size_t at = below(start);
    if (at == 0 || ranges[at - 1].start != start)
        return INVALID_VALUE;
    known--;
    memmove(ranges + at - 1, ranges + at, (known - at + 1) * sizeof *ranges);
    generation++;
    return OK;
}

/* ---- streams ---- */

struct Stream;
/* How far a stream is: after so many pieces of work of all it ever had. */
typedef struct { struct Stream *stream; unsigned long long after; } Place;

/* A piece of work. What it needs of the caller's was copied when it was put into the stream. */
typedef struct Work {
    struct Work *next;
    enum { LAUNCH, COPY, FILL, CALL, WAIT } kind;
    union {
        struct { const Kernel *kernel; Index grid, block; } launch;
        struct { void *to; const void *from; size_t bytes; } copy;
        struct { void *to; unsigned value; size_t width, count; } fill;
        struct { void (*function)(void *); void *data; } call;
        Place wait;
    };
    /* A launch's parameters, each at a multiple of 16 bytes, or what is copied from memory that may change. */
    unsigned char bytes[] __attribute__((aligned(16)));
} Work;

typedef struct Stream {
    struct Stream *next;
    unsigned long long added, done;
    /* What is not done yet. */
    Work *first, **end;
    /* What a piece of work failed with, until it is told. */
    int failed;
    /* Destroyed. The next one that is made is this again, so that a place in it stays one. */
    int gone;
} Stream;

/* The one without a handle is always there. All are as if made with CU_STREAM_NON_BLOCKING. */
static Stream first_stream = {.end = &first_stream.first};
/* No stream ever leaves the list. */
static Stream *const streams = &first_stream;

/* The stream of a handle. NULL if there is none. */
static Stream *stream_of(const void *handle)
{
    for (Stream *stream = streams; stream != NULL; stream = stream->next)
        if (stream == (handle == NULL ? &first_stream : handle))
            return stream->gone ? NULL : stream;
    return NULL;
}

/* How long a copy or launch takes. 0 where no thread does what is in the streams. */
static int copy_us;
/* Something was put into a stream, or is done. For the thread and those who wait for it. */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static void *work_over_time(void *none);

/* Has a thread do the work, if the process was started so. */
static void start_once(void)
{
    static int started;
    const char *us = getenv("STAND_IN_COPY_US");
    pthread_t thread;
    if (!started && us != NULL && (copy_us = atoi(us)) > 0)
        pthread_create(&thread, NULL, work_over_time, NULL);
    started = 1;
}

/* Puts a piece of work, with so many bytes of its own, at the end of a stream. */
static Work *put(Stream *stream, int kind, size_t bytes)
{
    start_once();
    Work *work = aligned_alloc(16, (sizeof *work + bytes + 15) / 16 * 16);
    work->next = NULL;
    work->kind = kind;
    *stream->end = work;
    stream->end = &work->next;
    stream->added++;
    pthread_cond_broadcast(&changed);
    return work;
}

static void do_until(Place place);

/* Where the next parameter lies. */
static size_t padded(size_t size) { return (size + 15) / 16 * 16; }

/* Runs every thread of a launch. Says whether all they touched was theirs. */
static int launch(const Kernel *kernel, Index grid, Index block, unsigned char *bytes)
{
    void *parameters[PARAMETERS];
    for (size_t at = 0; kernel->sizes[at] != 0; bytes += padded(kernel->sizes[at++]))
        parameters[at] = bytes;
    faults = 0;
    gridDim = grid;
    blockDim = block;
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++)
                for (threadIdx.z = 0; threadIdx.z < block.z; threadIdx.z++)
                    for (threadIdx.y = 0; threadIdx.y < block.y; threadIdx.y++)
                        for (threadIdx.x = 0; threadIdx.x < block.x; threadIdx.x++)
                            kernel->run(parameters);
    return faults == 0 ? OK : LAUNCH_FAILED;
}

/* Does a piece of work. Says what it failed with. */
static int perform(Work *work)
{
    switch (work->kind) {
    case LAUNCH: return launch(work->launch.kernel, work->launch.grid, work->launch.block, work->bytes);
    case COPY: memcpy(work->copy.to, work->copy.from, work->copy.bytes); return OK;
    case FILL:
        for (size_t at = 0; at < work->fill.count; at++)
            memcpy((char *)work->fill.to + at * work->fill.width, &work->fill.value, work->fill.width);
        return OK;
    case CALL: work->call.function(work->call.data); return OK;
    case WAIT:
        /* An event lies before what waits for it, so that two streams never wait for each other. */
        do_until(work->wait);
        return work->wait.stream->failed;
    }
    return OK;
}

/* Does the next piece of work of a stream. */
static void do_next(Stream *stream)
{
    Work *work = stream->first;
    int result = lost == OK && of_device() == OK ? perform(work) : OK;
    if (result != OK)
        stream->failed = result;
    stream->first = work->next;
    if (stream->first == NULL)
        stream->end = &stream->first;
    stream->done++;
    free(work);
}

static void do_until(Place place)
{
    while (place.stream->done < place.after)
        do_next(place.stream);
}

/* The thread: one piece of work of each stream after the other. */
static void *work_over_time(void *none)
{
    pthread_mutex_lock(&lock);
    for (Stream *stream = streams;;) {
        Stream *last = stream;
        do
            stream = stream->next != NULL ? stream->next : streams;
        while (stream->first == NULL && stream != last);
        if (stream->first == NULL) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        if (stream->first->kind == COPY || stream->first->kind == LAUNCH) {
            pthread_mutex_unlock(&lock);
            usleep(copy_us);
            pthread_mutex_lock(&lock);
        }
        do_next(stream);
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

/* Waits for what is in a stream, until so many pieces of work are done. */
static void carry_out(Stream *stream, unsigned long long after)
{
    while (copy_us > 0 && stream->done < after)
        pthread_cond_wait(&changed, &lock);
    do_until((Place){stream, after});
}

static void carry_out_all(void)
{
    for (Stream *stream = streams; stream != NULL; stream = stream->next)
        carry_out(stream, stream->added);
}

/* What a call that waits for a stream, or adds to it, answers. A failure is told once, so that tests go on. */
static int told(Stream *stream)
{
    int device = of_device();
    int result = device != OK ? device : lost != OK ? lost : stream->failed;
    stream->failed = OK;
    return result;
}

int cuStreamCreate(void **handle, unsigned flags)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    Stream *stream = streams;
    while (stream != NULL && !stream->gone)
        stream = stream->next;
    if (stream == NULL) {
        stream = calloc(1, sizeof *stream);
        stream->end = &stream->first;
        stream->next = first_stream.next;
        first_stream.next = stream;
    }
    stream->gone = 0;
    *handle = stream;
    return unlocked(OK);
}

int cuStreamDestroy_v2(void *handle)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (stream == NULL || stream == &first_stream)
        return unlocked(INVALID_HANDLE);
    carry_out(stream, stream->added);
    stream->gone = 1;
    return unlocked(told(stream));
}

int cuStreamSynchronize(void *handle)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (stream == NULL)
        return unlocked(INVALID_HANDLE);
    carry_out(stream, stream->added);
    return unlocked(told(stream));
}

int cuCtxSynchronize(void)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    carry_out_all();
    int result = lost;
    for (Stream *stream = streams; stream != NULL; stream = stream->next) {
        int of_stream = told(stream);
        result = result != OK ? result : of_stream;
    }
    return unlocked(result);
}

/* Whether a stream has come to a place. Where it has not, it does one piece of work, if no thread does, so that who asks again and
 * again is answered in the end, and who asks once cannot count on it. */
static int asked(Stream *stream, unsigned long long after)
{
    if (stream->done >= after)
        return told(stream);
    if (copy_us == 0)
        do_next(stream);
    return lost != OK ? lost : NOT_READY;
}

int cuStreamQuery(void *handle)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    return unlocked(stream == NULL ? INVALID_HANDLE : asked(stream, stream->added));
}

int cuLaunchHostFunc(void *handle, void (*function)(void *), void *data)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (stream == NULL)
        return unlocked(INVALID_HANDLE);
    Work *work = put(stream, CALL, 0);
    work->call.function = function;
    work->call.data = data;
    return unlocked(OK);
}

/* ---- events: a place each. That of one that was not recorded yet is in no stream. ---- */

int cuEventCreate(Place **event, unsigned flags)
{
    DEVICE();
    *event = calloc(1, sizeof **event);
    return OK;
}

int cuEventDestroy_v2(Place *event)
{
    free(event);
    return OK;
}

int cuEventRecord(Place *event, void *handle)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (stream == NULL)
        return unlocked(INVALID_HANDLE);
    *event = (Place){stream, stream->added};
    return unlocked(OK);
}

int cuStreamWaitEvent(void *handle, Place *event, unsigned flags)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (stream == NULL)
        return unlocked(INVALID_HANDLE);
    if (event->stream != NULL)
        put(stream, WAIT, 0)->wait = *event;
    return unlocked(OK);
}

int cuEventQuery(Place *event)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    return unlocked(event->stream == NULL ? lost : asked(event->stream, event->after));
}

int cuEventSynchronize(Place *event)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    Place place = *event;
    if (place.stream == NULL)
        return unlocked(lost);
    carry_out(place.stream, place.after);
    return unlocked(told(place.stream));
}

int cuEventElapsedTime(float *ms, void *from, void *to) { *ms = 1; return OK; }
int cuEventElapsedTime_v2(float *ms, void *from, void *to) { *ms = 1; return OK; }

/* ---- memory that comes and goes ---- */

/* Takes the lock. */
static int allocate(void **memory, size_t bytes, size_t alignment)
{
    DEVICE();
    *memory = NULL;
    if (bytes == 0)
        return INVALID_VALUE;
    *memory = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (*memory == NULL)
        return NO_MEMORY;
    pthread_mutex_lock(&lock);
    return unlocked(note((unsigned long long)*memory, bytes));
}

/* Memory goes when everything in every stream is done, which may use it. Takes the lock. */
static int released(unsigned long long start)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    carry_out_all();
    return unlocked(forget(start));
}

#include "ipc.c"

int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) { return allocate(memory, bytes, 4096); }
int cuMemAllocHost_v2(void **memory, size_t bytes) { return allocate(memory, bytes, 4096); }

int cuMemFreeHost(void *memory)
{
    int result = released((unsigned long long)memory);
    if (result == OK)
        free(memory);
    return result;
}

int cuMemHostUnregister(void *memory) { return released((unsigned long long)memory); }

int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    return unlocked(note((unsigned long long)memory, bytes));
}

int cuMemHostGetDevicePointer_v2(unsigned long long *address, void *memory, unsigned flags)
{
    *address = (unsigned long long)memory;
    pthread_mutex_lock(&lock);
    return unlocked(reaches(*address, 1) ? OK : INVALID_VALUE);
}

int cuMemGetInfo_v2(size_t *free, size_t *total)
{
    *free = *total = 1 << 30;
    return OK;
}

/* ---- copies ---- */

int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void *handle)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (stream == NULL)
        return unlocked(INVALID_HANDLE);
    int to_reached = reaches(to, bytes), from_reached = reaches(from, bytes);
    if (!to_reached && !from_reached)
        return unlocked(bytes == 0 ? OK : INVALID_VALUE);
    /* The driver has read memory that is not pinned when it returns, whenever it writes the device's. */
    Work *work = put(stream, COPY, from_reached ? 0 : bytes);
    work->copy.to = (void *)to;
    work->copy.from = from_reached ? (void *)from : memcpy(work->bytes, (void *)from, bytes);
    work->copy.bytes = bytes;
    if (to_reached)
        return unlocked(OK);
    /* And it has written it. */
    carry_out(stream, stream->added);
    return unlocked(told(stream));
}

int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *stream)
{
    return cuMemcpyAsync(to, (unsigned long long)from, bytes, stream);
}

int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *stream)
{
    return cuMemcpyAsync((unsigned long long)to, from, bytes, stream);
}

int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void *stream)
{
    return cuMemcpyAsync(to, from, bytes, stream);
}

/* Those that are in no stream wait for everything, before and after. Takes the lock. */
static int at_once(int (*copy)(unsigned long long, unsigned long long, size_t, void *), unsigned long long to,
                   unsigned long long from, size_t bytes)
{
    int before = cuCtxSynchronize(), put = copy(to, from, bytes, NULL), after = cuCtxSynchronize();
    return before != OK ? before : put != OK ? put : after;
}

int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t bytes)
{
    return at_once(cuMemcpyAsync, to, (unsigned long long)from, bytes);
}

int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t bytes)
{
    return at_once(cuMemcpyAsync, (unsigned long long)to, from, bytes);
}

/* Takes the lock. */
static int filled(unsigned long long to, unsigned value, size_t width, size_t count, void *handle)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (stream == NULL)
        return unlocked(INVALID_HANDLE);
    if (!reaches(to, width * count))
        return unlocked(count == 0 ? OK : INVALID_VALUE);
    Work *work = put(stream, FILL, 0);
    work->fill.to = (void *)to;
    work->fill.value = value;
    work->fill.width = width;
    work->fill.count = count;
    return unlocked(OK);
}

int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, void *stream)
{
    return filled(to, value, 1, bytes, stream);
}

int cuMemsetD32Async(unsigned long long to, unsigned value, size_t count, void *stream)
{
    return filled(to, value, 4, count, stream);
}

static int bytes_filled(unsigned long long to, unsigned long long value, size_t bytes, void *stream)
{
    return filled(to, value, 1, bytes, stream);
}

int cuMemsetD8_v2(unsigned long long to, unsigned char value, size_t bytes)
{
    return at_once(bytes_filled, to, value, bytes);
}

/* ---- devices: all alike, with one primary context ---- */

static char something;

int cuInit(unsigned flags) { return visible() > 0 ? OK : NO_DEVICE; }
int cuDriverGetVersion(int *value) { *value = version; return OK; }
int cuDeviceGetCount(int *count) { *count = visible(); return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < visible() ? OK : 101; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "none: a CPU", length); return OK; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 1 << 30; return OK; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &something; return OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }

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
static const Kernel *const lists[] = {page_copy_kernels, exact_kernels, digest_kernels, piece_kernels};

/* The next kernel after one, over all lists. */
#define EACH_KERNEL(kernel)                                                                                            \
    for (size_t list = 0; list < sizeof lists / sizeof *lists; list++)                                                 \
        for (const Kernel *kernel = lists[list]; kernel->name != NULL; kernel++)

int cuModuleLoadData(void **module, const void *image)
{
    DEVICE();
    *module = &something;
    /* What the compiler below gives, the text of copy_pieces, or machine code of the real one. */
    int taken = memcmp(image, "compiled", 8) == 0 || memcmp(image, "//", 2) == 0 || memcmp(image, "\177ELF", 4) == 0;
    return taken ? OK : INVALID_VALUE;
}

int cuModuleUnload(void *module)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    carry_out_all();
    return unlocked(OK);
}

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
                   unsigned shared, void *handle, void **parameters, void **extra)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    Stream *stream = stream_of(handle);
    if (stream == NULL)
        return unlocked(INVALID_HANDLE);
    int before = told(stream);
    if (before != OK)
        return unlocked(before);
    if (refused_after >= 0 && refused_after-- == 0)
        return unlocked(INVALID_VALUE);
    if (bx == 0 || by == 0 || bz == 0 || bx > 0x7fffffff || by > 65535 || bz > 65535)
        return unlocked(INVALID_VALUE);
    if (tx == 0 || ty == 0 || tz == 0 || tz > 64 || (unsigned long long)tx * ty * tz > 1024)
        return unlocked(INVALID_VALUE);
    size_t bytes = 0;
    for (const unsigned short *size = kernel->sizes; *size != 0; size++)
        bytes += padded(*size);
    Work *work = put(stream, LAUNCH, bytes);
    work->launch.kernel = kernel;
    work->launch.grid = (Index){bx, by, bz};
    work->launch.block = (Index){tx, ty, tz};
    unsigned char *to = work->bytes;
    for (size_t at = 0; kernel->sizes[at] != 0; to += padded(kernel->sizes[at++]))
        memcpy(to, parameters[at], kernel->sizes[at]);
    launches++;
    strncpy(last_kernel, kernel->name, sizeof last_kernel - 1);
    return unlocked(OK);
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
