/* What CUDA's words mean where the kernels run on a CPU: one thread after the other, every access looked at. */
#include <stddef.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __grid_constant__

typedef struct { unsigned x, y, z, w; } uint4;
typedef struct { unsigned x, y; } uint2;
typedef struct { unsigned x, y, z; } Index;

extern _Thread_local Index blockIdx, threadIdx;

/* Notes an access outside every allocation, or one that is not aligned to its size; where it must not be made, returns a
 * place that takes it. */
void *checked(unsigned long long address, size_t bytes);

#define __ldcs(pointer) (*(__typeof__(pointer))checked((unsigned long long)(pointer), sizeof *(pointer)))
#define __stcg(pointer, value) (*(__typeof__(pointer))checked((unsigned long long)(pointer), sizeof *(pointer)) = (value))
