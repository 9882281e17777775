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
} Kernel;

#define ARGUMENT(type, at) (*(type *)parameters[at])
/* A kernel's list entry, which calls it with its parameters. */
#define ENTRY(name) {#name, run_##name}
