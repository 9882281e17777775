/* Included by driver.c: devices, their memory, which other processes can open, and the kernel that copies into it.
 *
 * CUDA_VISIBLE_DEVICES is numbers of one digit with commas. */
#include <fcntl.h>
#include <sys/mman.h>

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
    DEVICE();
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
    return unlocked(fits ? note(*address, bytes) : NO_MEMORY);
}

int cuMemFree_v2(unsigned long long address)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    carry_out_all();
    if (address == 0)
        return unlocked(OK);
    size_t at = 0;
    while (at < part_count && (unsigned long long)arena + parts[at].start != address)
        at++;
    int found = at < part_count;
    if (found) {
        size_t length = (parts[at].end - parts[at].start + PAGE - 1) / PAGE * PAGE;
        madvise((void *)address, length, MADV_REMOVE);
        memmove(parts + at, parts + at + 1, (--part_count - at) * sizeof *parts);
    }
    return unlocked(found ? forget(address) : INVALID_VALUE);
}

/* Which memory an address lies in. Takes the lock. */
static int range_of(unsigned long long address, Range *range)
{
    pthread_mutex_lock(&lock);
    size_t at = below(address);
    int found = at > 0 && address < ranges[at - 1].end;
    if (found)
        *range = ranges[at - 1];
    return unlocked(found);
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
    DEVICE();
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
    DEVICE();
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
    return unlocked(is_new ? note(*address, handle.bytes) : result);
}

int cuIpcCloseMemHandle(unsigned long long address)
{
    DEVICE();
    pthread_mutex_lock(&lock);
    carry_out_all();
    int at = 0;
    while (at < 256 && (opened[at].count == 0 || (unsigned long long)opened[at].memory != address))
        at++;
    if (at == 256)
        return unlocked(INVALID_VALUE);
    if (--opened[at].count == 0) {
        forget(address);
        munmap((void *)address, opened[at].handle.bytes);
    }
    return unlocked(OK);
}

/* How many are open, for tests. */
int fake_opened(void)
{
    int count = 0;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < 256; at++)
        count += opened[at].count;
    return unlocked(count);
}

/* ---- the kernel of the plugin for memory that is shared between processes, which has it as text of the driver's ---- */

typedef struct { unsigned long long to, from, bytes; } Piece;

/* The first thread of a block copies its pieces, in an order that nobody counts on. */
static void copy_pieces(const Piece *list, unsigned pieces)
{
    if (!reaches((unsigned long long)list, pieces * sizeof *list)) {
        faults++;
        return;
    }
    for (unsigned at = blockIdx.x; threadIdx.x == 0 && at < pieces; at += gridDim.x) {
        Piece piece = list[pieces - 1 - at];
        if ((piece.to | piece.from | piece.bytes) % 16 == 0 && reaches(piece.to, piece.bytes) && reaches(piece.from, piece.bytes))
            memcpy((void *)piece.to, (void *)piece.from, piece.bytes);
        else
            faults++;
    }
}

KERNEL(copy_pieces, const Piece *, unsigned)

static const Kernel piece_kernels[] = {ENTRY(copy_pieces), {0}};
