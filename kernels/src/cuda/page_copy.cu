// Strided copies of KV pages on a GPU: one kernel, for rows and strides that are multiples of 16, 8, 4, 2 or 1 bytes.
//
// NVRTC compiles this when the program runs. A C compiler compiles it too, for the tests, which then run the same
// arithmetic on a CPU; so it keeps to what C and CUDA share.

typedef unsigned int u32;
typedef unsigned long long u64;

// Kernel parameters end at 4096 bytes, and the page numbers travel in them: no upload, no memory to keep until the copy is
// done. More pages are more launches.
#define PAGES 464

#define THREADS 256
// Vectors that a thread loads before it stores the first, to have that many reads on the way.
#define EACH 4

// Division by a number that the host knows, exact for dividends below 2^31: (n * multiplier) >> shift.
typedef struct {
    u32 value;
    u32 multiplier;
    u32 shift;
} Divisor;

// Everything in bytes but where it says vectors. A page is dims[0] x .. x dims[3] rows of row.value vectors.
typedef struct {
    u64 source;
    u64 target;
    u64 source_page;
    u64 target_page;
    u64 source_steps[4];
    u64 target_steps[4];
    Divisor dims[4];
    // Vectors of a row.
    Divisor row;
    // Vectors of a page.
    Divisor page;
    u32 pages;
    u32 unused;
    u32 source_pages[PAGES];
    u32 target_pages[PAGES];
} PageCopy;

typedef struct {
    u64 source;
    u64 target;
} Place;

static __device__ __forceinline__ u32 divide(u32 number, Divisor by)
{
    return (u32)(((u64)number * by.multiplier) >> by.shift);
}

// Addresses of the vector with this number: pages in their order, rows of a page with dims[3] fastest.
static __device__ __forceinline__ Place place(const PageCopy *copy, u32 vector, u32 width)
{
    u32 page = divide(vector, copy->page);
    u32 in_page = vector - page * copy->page.value;
    u32 row = divide(in_page, copy->row);
    u64 in_row = (u64)(in_page - row * copy->row.value) * width;
    Place at;
    at.source = copy->source + copy->source_pages[page] * copy->source_page + in_row;
    at.target = copy->target + copy->target_pages[page] * copy->target_page + in_row;
#pragma unroll
    for (int dim = 3; dim >= 0; dim--) {
        if (copy->dims[dim].value > 1) {
            u32 outer = divide(row, copy->dims[dim]);
            u32 index = row - outer * copy->dims[dim].value;
            at.source += index * copy->source_steps[dim];
            at.target += index * copy->target_steps[dim];
            row = outer;
        }
    }
    return at;
}

#ifdef __cplusplus
#define EXPORTED extern "C"
#else
#define EXPORTED
#endif

// Loads that the caches may forget first, as nothing is read twice; stores that stay in L2 for the next reader.
#define PAGE_COPY(name, type)                                                                                          \
    EXPORTED __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ PageCopy copy)                    \
    {                                                                                                                  \
        u32 vectors = copy.pages * copy.page.value;                                                                    \
        u32 first = blockIdx.x * (THREADS * EACH) + threadIdx.x;                                                       \
        type values[EACH];                                                                                             \
        u64 targets[EACH];                                                                                             \
        _Pragma("unroll") for (u32 i = 0; i < EACH; i++)                                                               \
        {                                                                                                              \
            u32 vector = first + i * THREADS;                                                                          \
            if (vector < vectors) {                                                                                    \
                Place at = place(&copy, vector, sizeof(type));                                                         \
                values[i] = __ldcs((const type *)at.source);                                                           \
                targets[i] = at.target;                                                                                \
            }                                                                                                          \
        }                                                                                                              \
        _Pragma("unroll") for (u32 i = 0; i < EACH; i++)                                                               \
        {                                                                                                              \
            if (first + i * THREADS < vectors)                                                                         \
                __stcg((type *)targets[i], values[i]);                                                                 \
        }                                                                                                              \
    }

PAGE_COPY(page_copy_16, uint4)
PAGE_COPY(page_copy_8, uint2)
PAGE_COPY(page_copy_4, unsigned int)
PAGE_COPY(page_copy_2, unsigned short)
PAGE_COPY(page_copy_1, unsigned char)
