/* The exact math, for the stand-in. Parameters are those of the kernels, in their order. */
#include "exact.cu"

KERNEL(embed_f32, const float *, const u32 *, u32, u32, u32, float *)
KERNEL(embed_bf16, const u16 *, const u32 *, u32, u32, u32, float *)
KERNEL(embed_f16, const u16 *, const u32 *, u32, u32, u32, float *)
KERNEL(square_lanes, const float *, u32, u32, u32, u64, float *)
KERNEL(rms_norm, const float *, const float *, const float *, float, u32, float *)
KERNEL(rotate_heads, float *, u32, u32, u32, const float *, float, const float *, const float *, const float *)
KERNEL(gated_silu, const float *, u32, float *)
KERNEL(gated_gelu_tanh, const float *, u32, float *)
KERNEL(add, float *, const float *, u64)
KERNEL(select_rows, const float *, const u32 *, u32, float *)
KERNEL(greatest_of_shares, const float *, u32, float *, u32 *)
KERNEL(greatest_of_rows, const float *, const u32 *, u32, u32 *)
KERNEL(linear_f32_1, const float *, u32, const float *, u32, u32, float *)
KERNEL(linear_f32_2, const float *, u32, const float *, u32, u32, float *)
KERNEL(linear_f32_8, const float *, u32, const float *, u32, u32, float *)
KERNEL(linear_bf16_1, const float *, u32, const u16 *, u32, u32, float *)
KERNEL(linear_bf16_2, const float *, u32, const u16 *, u32, u32, float *)
KERNEL(linear_bf16_8, const float *, u32, const u16 *, u32, u32, float *)
KERNEL(linear_f16_1, const float *, u32, const u16 *, u32, u32, float *)
KERNEL(linear_f16_2, const float *, u32, const u16 *, u32, u32, float *)
KERNEL(linear_f16_8, const float *, u32, const u16 *, u32, u32, float *)
KERNEL(write_kv, const float *, u32, u32, u32, u32, u32, const u32 *, const u32 *, const u32 *, const KvView,
       const Divisor)
KERNEL(attention_scores_f32, const float *, u32, u32, u32, u32, float, const u32 *, const u32 *, const u32 *,
       const KvView, const Divisor, float *, u32)
KERNEL(attention_scores_bf16, const float *, u32, u32, u32, u32, float, const u32 *, const u32 *, const u32 *,
       const KvView, const Divisor, float *, u32)
KERNEL(attention_maxima, u32, const u32 *, float *, u32)
KERNEL(attention_weights, u32, const u32 *, float *, u32)
KERNEL(attention_values_f32, u32, u32, u32, const u32 *, const u32 *, const u32 *, const KvView, const Divisor, float *,
       u32, float *)
KERNEL(attention_values_bf16, u32, u32, u32, const u32 *, const u32 *, const u32 *, const KvView, const Divisor,
       float *, u32, float *)

const Kernel exact_kernels[] = {
    ENTRY(embed_f32), ENTRY(embed_bf16), ENTRY(embed_f16), ENTRY(square_lanes), ENTRY(rms_norm), ENTRY(rotate_heads),
    ENTRY(gated_silu), ENTRY(gated_gelu_tanh), ENTRY(add), ENTRY(select_rows), ENTRY(greatest_of_shares),
    ENTRY(greatest_of_rows), ENTRY(linear_f32_1), ENTRY(linear_f32_2), ENTRY(linear_f32_8), ENTRY(linear_bf16_1),
    ENTRY(linear_bf16_2), ENTRY(linear_bf16_8), ENTRY(linear_f16_1), ENTRY(linear_f16_2), ENTRY(linear_f16_8),
    ENTRY(write_kv), ENTRY(attention_scores_f32), ENTRY(attention_scores_bf16), ENTRY(attention_maxima),
    ENTRY(attention_weights), ENTRY(attention_values_f32), ENTRY(attention_values_bf16), {0}};
