/* The exact math, for the stand-in. Parameters are those of the kernels, in their order. */
#include "exact.cu"

static void run_embed_f32(void **parameters)
{
    embed_f32(ARGUMENT(const float *, 0), ARGUMENT(const u32 *, 1), ARGUMENT(u32, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float *, 5));
}

static void run_embed_bf16(void **parameters)
{
    embed_bf16(ARGUMENT(const u16 *, 0), ARGUMENT(const u32 *, 1), ARGUMENT(u32, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float *, 5));
}

static void run_embed_f16(void **parameters)
{
    embed_f16(ARGUMENT(const u16 *, 0), ARGUMENT(const u32 *, 1), ARGUMENT(u32, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float *, 5));
}

static void run_square_lanes(void **parameters)
{
    square_lanes(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(u32, 2), ARGUMENT(u32, 3), ARGUMENT(u64, 4),
        ARGUMENT(float *, 5));
}

static void run_rms_norm(void **parameters)
{
    rms_norm(ARGUMENT(const float *, 0), ARGUMENT(const float *, 1), ARGUMENT(const float *, 2), ARGUMENT(float, 3),
        ARGUMENT(u32, 4), ARGUMENT(float *, 5));
}

static void run_rotate_heads(void **parameters)
{
    rotate_heads(ARGUMENT(float *, 0), ARGUMENT(u32, 1), ARGUMENT(u32, 2), ARGUMENT(u32, 3),
        ARGUMENT(const float *, 4), ARGUMENT(float, 5), ARGUMENT(const float *, 6), ARGUMENT(const float *, 7),
        ARGUMENT(const float *, 8));
}

static void run_gated_silu(void **parameters)
{
    gated_silu(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(float *, 2));
}

static void run_gated_gelu_tanh(void **parameters)
{
    gated_gelu_tanh(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(float *, 2));
}

static void run_add(void **parameters)
{
    add(ARGUMENT(float *, 0), ARGUMENT(const float *, 1), ARGUMENT(u64, 2));
}

static void run_select_rows(void **parameters)
{
    select_rows(ARGUMENT(const float *, 0), ARGUMENT(const u32 *, 1), ARGUMENT(u32, 2), ARGUMENT(float *, 3));
}

static void run_greatest_of_shares(void **parameters)
{
    greatest_of_shares(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(float *, 2), ARGUMENT(u32 *, 3));
}

static void run_greatest_of_rows(void **parameters)
{
    greatest_of_rows(ARGUMENT(const float *, 0), ARGUMENT(const u32 *, 1), ARGUMENT(u32, 2), ARGUMENT(u32 *, 3));
}

static void run_linear_f32_1(void **parameters)
{
    linear_f32_1(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(const float *, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float *, 5));
}

static void run_linear_f32_2(void **parameters)
{
    linear_f32_2(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(const float *, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float *, 5));
}

static void run_linear_f32_8(void **parameters)
{
    linear_f32_8(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(const float *, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float *, 5));
}

static void run_linear_bf16_1(void **parameters)
{
    linear_bf16_1(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(const u16 *, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float *, 5));
}

static void run_linear_bf16_2(void **parameters)
{
    linear_bf16_2(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(const u16 *, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float *, 5));
}

static void run_linear_bf16_8(void **parameters)
{
    linear_bf16_8(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(const u16 *, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float *, 5));
}

static void run_linear_f16_1(void **parameters)
{
    linear_f16_1(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(const u16 *, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float *, 5));
}

static void run_linear_f16_2(void **parameters)
{
    linear_f16_2(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(const u16 *, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float *, 5));
}

static void run_linear_f16_8(void **parameters)
{
    linear_f16_8(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(const u16 *, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float *, 5));
}

static void run_write_kv(void **parameters)
{
    write_kv(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(u32, 2), ARGUMENT(u32, 3), ARGUMENT(u32, 4),
        ARGUMENT(u32, 5), ARGUMENT(const u32 *, 6), ARGUMENT(const u32 *, 7), ARGUMENT(const u32 *, 8),
        ARGUMENT(const KvView, 9), ARGUMENT(const Divisor, 10));
}

static void run_attention_scores_f32(void **parameters)
{
    attention_scores_f32(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(u32, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float, 5), ARGUMENT(const u32 *, 6), ARGUMENT(const u32 *, 7),
        ARGUMENT(const u32 *, 8), ARGUMENT(const KvView, 9), ARGUMENT(const Divisor, 10), ARGUMENT(float *, 11),
        ARGUMENT(u32, 12));
}

static void run_attention_scores_bf16(void **parameters)
{
    attention_scores_bf16(ARGUMENT(const float *, 0), ARGUMENT(u32, 1), ARGUMENT(u32, 2), ARGUMENT(u32, 3),
        ARGUMENT(u32, 4), ARGUMENT(float, 5), ARGUMENT(const u32 *, 6), ARGUMENT(const u32 *, 7),
        ARGUMENT(const u32 *, 8), ARGUMENT(const KvView, 9), ARGUMENT(const Divisor, 10), ARGUMENT(float *, 11),
        ARGUMENT(u32, 12));
}

static void run_attention_maxima(void **parameters)
{
    attention_maxima(ARGUMENT(u32, 0), ARGUMENT(const u32 *, 1), ARGUMENT(float *, 2), ARGUMENT(u32, 3));
}

static void run_attention_weights(void **parameters)
{
    attention_weights(ARGUMENT(u32, 0), ARGUMENT(const u32 *, 1), ARGUMENT(float *, 2), ARGUMENT(u32, 3));
}

static void run_attention_values_f32(void **parameters)
{
    attention_values_f32(ARGUMENT(u32, 0), ARGUMENT(u32, 1), ARGUMENT(u32, 2), ARGUMENT(const u32 *, 3),
        ARGUMENT(const u32 *, 4), ARGUMENT(const u32 *, 5), ARGUMENT(const KvView, 6), ARGUMENT(const Divisor, 7),
        ARGUMENT(float *, 8), ARGUMENT(u32, 9), ARGUMENT(float *, 10));
}

static void run_attention_values_bf16(void **parameters)
{
    attention_values_bf16(ARGUMENT(u32, 0), ARGUMENT(u32, 1), ARGUMENT(u32, 2), ARGUMENT(const u32 *, 3),
        ARGUMENT(const u32 *, 4), ARGUMENT(const u32 *, 5), ARGUMENT(const KvView, 6), ARGUMENT(const Divisor, 7),
        ARGUMENT(float *, 8), ARGUMENT(u32, 9), ARGUMENT(float *, 10));
}

const Kernel exact_kernels[] = {
    ENTRY(embed_f32), ENTRY(embed_bf16), ENTRY(embed_f16), ENTRY(square_lanes), ENTRY(rms_norm), ENTRY(rotate_heads),
    ENTRY(gated_silu), ENTRY(gated_gelu_tanh), ENTRY(add), ENTRY(select_rows), ENTRY(greatest_of_shares),
    ENTRY(greatest_of_rows), ENTRY(linear_f32_1), ENTRY(linear_f32_2), ENTRY(linear_f32_8), ENTRY(linear_bf16_1),
    ENTRY(linear_bf16_2), ENTRY(linear_bf16_8), ENTRY(linear_f16_1), ENTRY(linear_f16_2), ENTRY(linear_f16_8),
    ENTRY(write_kv), ENTRY(attention_scores_f32), ENTRY(attention_scores_bf16), ENTRY(attention_maxima),
    ENTRY(attention_weights), ENTRY(attention_values_f32), ENTRY(attention_values_bf16), {0}};
