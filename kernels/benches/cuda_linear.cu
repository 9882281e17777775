// What the benchmark of linear.cu needs on the device: numbers, and the same sums by another instruction.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

/// Numbers between -1 and 1 in bf16, with 8 bits each, by their index.
extern "C" __global__ void fill(u16 *out, u64 count, u32 seed) {
    const u64 index = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= count) return;
    u64 hash = (index + 1) * 0x9e3779b97f4a7c15ull + seed * 0xbf58476d1ce4e5b9ull;
    hash = (hash ^ hash >> 31) * 0x94d049bb133111ebull;
    const float value = static_cast<int>(hash >> 40) * (2.0f / (1 << 24)) - 1.0f;
    out[index] = __float_as_uint(value) >> 16;
}

/// Of row-major X and W, one warp for 16 outputs and 8 rows: a chain of mma.sync over each slice, and the slices added.
extern "C" __global__ void chain(const u16 *x, const u16 *w, float *y, u32 rows, u32 outputs, u32 inputs, u32 blocks,
                                 u32 slices) {
    const u32 g = threadIdx.x / 4, q = threadIdx.x % 4;
    const u32 output = blockIdx.x * 16 + g, row = blockIdx.y * 8;
    const u32 *const weights = reinterpret_cast<const u32 *>(w), *const elements = reinterpret_cast<const u32 *>(x);
    float total[4];
    for (u32 slice = 0; slice < slices; ++slice) {
        float sums[4] = {};
        const u32 end = min((slice + 1) * blocks / slices * 64, inputs);
        for (u32 k = slice * blocks / slices * 64; k < end; k += 16) {
            u32 a[4], b[2];
            for (u32 i = 0; i < 4; ++i) {
                const u32 column = k + i / 2 * 8 + 2 * q;
                const u64 at = static_cast<u64>(output + i % 2 * 8) * inputs + column;
                a[i] = column < inputs ? weights[at / 2] : 0;
            }
            for (u32 i = 0; i < 2; ++i) {
                const u32 column = k + i * 8 + 2 * q;
                const u64 at = static_cast<u64>(row + g) * inputs + column;
                b[i] = column < inputs && row + g < rows ? elements[at / 2] : 0;
            }
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                         "{%0, %1, %2, %3};"
                         : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
        }
        for (u32 i = 0; i < 4; ++i) total[i] = slice == 0 ? sums[i] : total[i] + sums[i];
    }
    for (u32 i = 0; i < 4; ++i) {
        const u32 token = row + 2 * q + i % 2;
        if (token < rows) y[static_cast<u64>(token) * outputs + output + i / 2 * 8] = total[i];
    }
}
