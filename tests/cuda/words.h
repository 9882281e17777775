/* What CUDA's words mean where the kernels run on a CPU: one thread after the other, every access looked at. */
#include <math.h>
#include <stddef.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__
#define __constant__

typedef struct { unsigned x, y, z, w; } uint4;
typedef struct { unsigned x, y; } uint2;
typedef struct { float x, y, z, w; } float4;
typedef struct { unsigned long long x, y; } ulonglong2;
typedef struct { unsigned x, y, z; } Index;

/* Of the thread that runs. One launch runs at a time. */
extern Index blockIdx, threadIdx, blockDim, gridDim;

static inline float __uint_as_float(unsigned bits)
{
    union { unsigned bits; float value; } both = {.bits = bits};
    return both.value;
}

static inline unsigned __float_as_uint(float value)
{
    union { float value; unsigned bits; } both = {.value = value};
    return both.bits;
}

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

/* Where the access at one place of the source was last: most of the next ones are in the same memory. */
typedef struct {
    unsigned long long start, end, generation;
} Seen;

/* Changes whenever memory comes or goes. */
extern unsigned long long generation;

/* Notes an access outside of every allocation, or one that is not aligned to its size; where it must not be made, gives a
 * place that takes it. */
void *checked(Seen *seen, unsigned long long address, size_t bytes);

static inline void *looked_at(Seen *seen, unsigned long long address, size_t bytes)
{
    if (address % bytes == 0 && address >= seen->start && address + bytes <= seen->end && seen->generation == generation)
        return (void *)address;
    return checked(seen, address, bytes);
}

#define LOAD(pointer)                                                                                                  \
    (*({                                                                                                               \
        static Seen seen;                                                                                              \
        (__typeof__(pointer))looked_at(&seen, (unsigned long long)(pointer), sizeof *(pointer));                       \
    }))
#define STORE(pointer, value) ((void)(LOAD(pointer) = (value)))
#define ADD_AT_ONCE(pointer, value) ((void)(LOAD(pointer) += (value)))
#define __ldcs(pointer) LOAD(pointer)
#define __stcg(pointer, value) STORE(pointer, value)

/* ---- for the files that list kernels ---- */

typedef struct {
    const char *name;
    void (*run)(void **parameters);
    /* Bytes of each parameter. 0 ends them. */
    const unsigned short *sizes;
} Kernel;

/* Parameters that a kernel has at most. */
#define PARAMETERS 13

/* what(type, at) of each of the types, which are `of`, separated by commas. */
#define LAST_1(what, of, type) what(type, of - 1)
#define LAST_2(what, of, type, ...) what(type, of - 2), LAST_1(what, of, __VA_ARGS__)
#define LAST_3(what, of, type, ...) what(type, of - 3), LAST_2(what, of, __VA_ARGS__)
#define LAST_4(what, of, type, ...) what(type, of - 4), LAST_3(what, of, __VA_ARGS__)
#define LAST_5(what, of, type, ...) what(type, of - 5), LAST_4(what, of, __VA_ARGS__)
#define LAST_6(what, of, type, ...) what(type, of - 6), LAST_5(what, of, __VA_ARGS__)
#define LAST_7(what, of, type, ...) what(type, of - 7), LAST_6(what, of, __VA_ARGS__)
#define LAST_8(what, of, type, ...) what(type, of - 8), LAST_7(what, of, __VA_ARGS__)
#define LAST_9(what, of, type, ...) what(type, of - 9), LAST_8(what, of, __VA_ARGS__)
#define LAST_10(what, of, type, ...) what(type, of - 10), LAST_9(what, of, __VA_ARGS__)
#define LAST_11(what, of, type, ...) what(type, of - 11), LAST_10(what, of, __VA_ARGS__)
#define LAST_12(what, of, type, ...) what(type, of - 12), LAST_11(what, of, __VA_ARGS__)
#define LAST_13(what, of, type, ...) what(type, of - 13), LAST_12(what, of, __VA_ARGS__)
#define FOURTEENTH(a, b, c, d, e, f, g, h, i, j, k, l, m, n, ...) n
#define COUNT(...) FOURTEENTH(__VA_ARGS__, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#define JOINED(a, b) a##b
#define LAST(count) JOINED(LAST_, count)
#define OF_EACH(what, ...) LAST(COUNT(__VA_ARGS__))(what, COUNT(__VA_ARGS__), __VA_ARGS__)

#define ARGUMENT(type, at) (*(type *)parameters[at])
#define SIZE(type, at) sizeof(type)
/* What calls a kernel with its parameters, which are of these types. */
#define KERNEL(name, ...)                                                                                              \
    static void run_##name(void **parameters) { name(OF_EACH(ARGUMENT, __VA_ARGS__)); }                                   \
    static const unsigned short sizes_##name[] = {OF_EACH(SIZE, __VA_ARGS__), 0};
/* A kernel's list entry. */
#define ENTRY(name) {#name, run_##name, sizes_##name}
