// Names of types, and rounding to bf16. It stands before every other text of this folder.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Two numbers as bf16, the first one in the lower bits.
static __device__ __forceinline__ u32 bf16_pair(float low, float high)
{
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

