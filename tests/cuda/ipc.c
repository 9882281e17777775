/* Included by driver.c: memory of devices, which other processes can open, and what is done in a stream, which may take its time.
 *
 * Variables of the environment: CUDA_VISIBLE_DEVICES, numbers of one digit with commas. STAND_IN_COPY_US, how long each copy in a
 * stream takes; without it, it is done when the call returns. */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int memfd_create(const char *name, unsigned flags);

/* ---- devices, and contexts: a stack of each thread's ---- */

static int visible(void)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    return list == NULL ? devices : ((int)strlen(list) + 1) / 2;
}

int cuDeviceGetUuid_v2(char *uuid, int device)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    memcpy(uuid, "CPU-stand-in....", 16);
    uuid[15] = list == NULL ? '0' + device : list[2 * device];
    return OK;
}

int cuDeviceCanAccessPeer(int *can, int device, int other) { *can = 0; return OK; }
int cuCtxEnablePeerAccess(void *context, unsigned flags) { return UNSUPPORTED; }

static _Thread_local void *contexts[16];
static _Thread_local int depth;

int cuCtxGetCurrent(void **context) { *context = contexts[depth]; return OK; }
int cuCtxSetCurrent(void *context) { contexts[depth] = context; return OK; }

int cuCtxPushCurrent_v2(void *context)
{
    if (depth == 15)
        return INVALID_VALUE;
    contexts[++depth] = context;
    return OK;
}

int cuCtxPopCurrent_v2(void **context)
{
    if (depth == 0)
        return 201;
    *context = contexts[depth--];
    return OK;
}

/* ---- memory of devices: parts of one file, whose pages have others in between ---- */

enum { PAGE = 4096 };
static const size_t ALL = (size_t)64 << 30;
static int file = -1;
static char *arena;
/* By their start. */
static Range *parts;
static size_t part_count, part_room;

int cuMemAlloc_v2(unsigned long long *address, size_t bytes)
{
    *address = 0;
    if (bytes == 0)
        return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (file < 0) {
        file = memfd_create("cuda-stand-in", 1);
        arena = ftruncate(file, ALL) == 0 ? mmap(NULL, ALL, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0)
                                          : MAP_FAILED;
    }
    size_t at = 0;
    unsigned long long start = PAGE;
    while (at < part_count && parts[at].start < start + bytes + PAGE)
        start = (parts[at++].end + 2 * PAGE - 1) / PAGE * PAGE;
    int fits = arena != MAP_FAILED && start + bytes <= ALL;
    if (fits) {
        if (part_count == part_room) {
            part_room = 2 * part_room + 64;
            parts = realloc(parts, part_room * sizeof *parts);
        }
        memmove(parts + at + 1, parts + at, (part_count++ - at) * sizeof *parts);
        parts[at] = (Range){start, start + bytes};
        *address = (unsigned long long)arena + start;
    }
    pthread_mutex_unlock(&lock);
    return fits ? note(*address, bytes) : 2;
}

int cuMemFree_v2(unsigned long long address)
{
    cuCtxSynchronize();
    if (address == 0)
        return OK;
    pthread_mutex_lock(&lock);
    size_t at = 0;
    while (at < part_count && (unsigned long long)arena + parts[at].start != address)
        at++;
    int found = at < part_count;
    if (found) {
        size_t length = (parts[at].end - parts[at].start + PAGE - 1) / PAGE * PAGE;
        madvise((void *)address, length, MADV_REMOVE);
        memmove(parts + at, parts + at + 1, (--part_count - at) * sizeof *parts);
    }
    pthread_mutex_unlock(&lock);
    return found ? forget(address) : INVALID_VALUE;
}

/* Which memory an address lies in. */
static int range_of(unsigned long long address, Range *range)
{
    pthread_mutex_lock(&lock);
    size_t at = below(address);
    int found = at > 0 && address < ranges[at - 1].end;
    if (found)
        *range = ranges[at - 1];
    pthread_mutex_unlock(&lock);
    return found;
}

int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long address)
{
    Range range;
    if (!range_of(address, &range))
        return NOT_FOUND;
    *base = range.start;
    *size = range.end - range.start;
    return OK;
}

int cuPointerGetAttribute(void *value, int attribute, unsigned long long address)
{
    Range range;
    if (!range_of(address, &range))
        return INVALID_VALUE;
    switch (attribute) {
    case 11: *(unsigned long long *)value = range.start; return OK;
    case 12: *(size_t *)value = range.end - range.start; return OK;
    default: return UNSUPPORTED;
    }
}

/* ---- memory of other processes' devices ---- */

typedef union {
    struct {
        int process, file;
        unsigned long long start, bytes;
    };
    char room[64];
} Handle;

/* What is open, and how often. */
static struct { Handle handle; void *memory; int count; } opened[256];

int cuIpcGetMemHandle(Handle *handle, unsigned long long address)
{
    Range range;
    if (arena == NULL || address < (unsigned long long)arena || address >= (unsigned long long)arena + ALL ||
        !range_of(address, &range) || range.start != address)
        return INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    handle->process = getpid();
    handle->file = file;
    handle->start = address - (unsigned long long)arena;
    handle->bytes = range.end - range.start;
    return OK;
}

int cuIpcOpenMemHandle_v2(unsigned long long *address, Handle handle, unsigned flags)
{
    if (handle.process == getpid())
        return 201;
    pthread_mutex_lock(&lock);
    int at = 0, unused = -1, result = OK, is_new = 0;
    for (; at < 256 && (opened[at].count == 0 || memcmp(&opened[at].handle, &handle, sizeof handle) != 0); at++)
        if (opened[at].count == 0 && unused < 0)
            unused = at;
    if (at == 256) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.file);
        int its = open(path, O_RDWR | O_CLOEXEC);
        void *memory = its < 0 || unused < 0 ? MAP_FAILED
                     : mmap(NULL, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, its, handle.start);
        if (its >= 0)
            close(its);
        at = unused;
        is_new = memory != MAP_FAILED;
        result = is_new ? OK : INVALID_VALUE;
        if (is_new) {
            opened[at].handle = handle;
            opened[at].memory = memory;
        }
    }
    if (result == OK) {
        opened[at].count++;
        *address = (unsigned long long)opened[at].memory;
    }
    pthread_mutex_unlock(&lock);
    return is_new ? note(*address, handle.bytes) : result;
}

int cuIpcCloseMemHandle(unsigned long long address)
{
    cuCtxSynchronize();
    pthread_mutex_lock(&lock);
    int at = 0, last = 0;
    while (at < 256 && (opened[at].count == 0 || (unsigned long long)opened[at].memory != address))
        at++;
    if (at < 256)
        last = --opened[at].count == 0;
    pthread_mutex_unlock(&lock);
    if (last) {
        forget(address);
        munmap((void *)address, opened[at].handle.bytes);
    }
    return at < 256 ? OK : INVALID_VALUE;
}

/* How many are open, for tests. */
int fake_opened(void)
{
    int count = 0;
    for (int at = 0; at < 256; at++)
        count += opened[at].count;
    return count;
}

/* ---- work in streams: one thread does it, in the order in which it came ---- */

typedef struct { unsigned long long to, from, bytes; } Piece;

/* A copy, the pieces of a list, or the record of an event. */
typedef struct {
    unsigned long long to, from;
    size_t bytes;
    const Piece *list;
    unsigned pieces;
    atomic_int *event;
} Work;

enum { WORK = 65536 };
static Work *work;
static unsigned long long begun, done;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pthread_mutex_t works = PTHREAD_MUTEX_INITIALIZER;
static int copy_us;

/* The kernel of this name takes lists of pieces, each of whose numbers is a multiple of 16. */
static const Kernel copy_pieces = {"copy_pieces", NULL};
static _Thread_local int failed;

static int within(unsigned long long start, size_t bytes)
{
    Range range;
    return range_of(start, &range) && start + bytes <= range.end;
}

static void perform(const Work *what)
{
    if (what->list != NULL)
        /* In an order that nobody counts on. */
        for (unsigned i = what->pieces; i-- > 0;) {
            Piece piece = what->list[i];
            if ((piece.to | piece.from | piece.bytes) % 16 == 0 && within(piece.to, piece.bytes) && within(piece.from, piece.bytes))
                memcpy((void *)piece.to, (void *)piece.from, piece.bytes);
            else
                failed = LAUNCH_FAILED;
        }
    else if (what->event != NULL)
        atomic_fetch_sub(what->event, 1);
    else
        memcpy((void *)what->to, (void *)what->from, what->bytes);
}

static void *perform_all(void *none)
{
    for (;;) {
        pthread_mutex_lock(&works);
        while (begun == done)
            pthread_cond_wait(&changed, &works);
        Work next = work[done % WORK];
        pthread_mutex_unlock(&works);
        if (next.event == NULL)
            usleep(copy_us);
        perform(&next);
        if (failed != OK)
            abort();
        pthread_mutex_lock(&works);
        done++;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&works);
    }
    return NULL;
}

static void start_thread(void)
{
    const char *us = getenv("STAND_IN_COPY_US");
    pthread_t thread;
    copy_us = us == NULL ? 0 : atoi(us);
    if (copy_us > 0) {
        work = calloc(WORK, sizeof *work);
        pthread_create(&thread, NULL, perform_all, NULL);
    }
}

static int later(Work what)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start_thread);
    if (what.event != NULL)
        atomic_fetch_add(what.event, 1);
    if (copy_us == 0) {
        failed = OK;
        perform(&what);
        return failed;
    }
    pthread_mutex_lock(&works);
    while (begun - done == WORK)
        pthread_cond_wait(&changed, &works);
    work[begun++ % WORK] = what;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&works);
    return OK;
}

int cuCtxSynchronize(void)
{
    pthread_mutex_lock(&works);
    unsigned long long all = begun;
    while (done < all)
        pthread_cond_wait(&changed, &works);
    pthread_mutex_unlock(&works);
    return OK;
}

int cuStreamSynchronize(void *stream)
{
    int result = cuCtxSynchronize();
    return lost != OK ? lost : result;
}

int cuStreamQuery(void *stream)
{
    pthread_mutex_lock(&works);
    int idle = begun == done;
    pthread_mutex_unlock(&works);
    return idle ? OK : 600;
}

/* An event counts how often it was recorded and not yet come to. */
int cuEventCreate(void **event, unsigned flags) { *event = calloc(1, sizeof(atomic_int)); return OK; }
int cuEventRecord(atomic_int *event, void *stream) { return later((Work){.event = event}); }
int cuEventQuery(atomic_int *event) { return atomic_load(event) == 0 ? OK : 600; }

int cuEventSynchronize(atomic_int *event)
{
    while (atomic_load(event) > 0)
        usleep(20);
    return OK;
}

int cuEventDestroy_v2(atomic_int *event)
{
    cuEventSynchronize(event);
    free(event);
    return OK;
}
