// What the kernels of rows and attention share: following the kernel before, and where K and V lie. It stands before each of their
// sources, after bits.cuh.

#define INLINE static __device__ __forceinline__

// Position of a row that belongs to no sequence: padding of a batch.
constexpr u32 NO_POSITION = 0xffffffffu;

#define MINUS_INFINITY __int_as_float(0xff800000)

// Waits until the kernel before this one is done, and what it wrote is seen.
INLINE void wait_for_the_kernel_before()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start where there is room. It waits for the end of this one by itself.
INLINE void start_the_next_kernel()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// In this order, all kernels before this one are done when the next one starts.
INLINE void follow()
{
    wait_for_the_kernel_before();
    start_the_next_kernel();
}

// Division by a number that the host knows, exact for dividends below 2^31.
struct Divisor {
    u32 value;
    u32 multiplier;
    u32 shift;
};

INLINE u32 divide(u32 number, Divisor by)
{
    return (u32)(((u64)number * by.multiplier) >> by.shift);
}

// K (0) and V (1) of one layer, as rows of one head's K or V of one token. Both lie alike. Strides are in rows.
struct Pool {
    u64 start[2];
    u32 page;
    u32 head;
    u32 token;
    Divisor page_tokens;
};
