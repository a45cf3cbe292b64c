// The kernels that `layers.cpp` calls. Each is described where it is defined.
#pragma once
#include "lora.h"
#include "vector.h"

extern "C" {

void linear(const bf16* x, const bf16* packed, const bf16* bias, void* y, int64_t M, int64_t N, int64_t K, int64_t wide,
            int64_t threads);
void int8_linear(const int8_t* x, const float* x_scales, const int32_t* excess, const uint8_t* packed, const float* scales,
                 const bf16* bias, void* y, int64_t M, int64_t N, int64_t K, int64_t wide, int64_t threads);
void grouped_linear(int64_t code, const bf16* x, const uint32_t* packed, const bf16* bias, void* y, int64_t M, int64_t N,
                    int64_t K, int64_t group, int64_t wide, int64_t threads);
void quantize_rows(const bf16* x, int8_t* values, float* scales, int32_t* excess, int64_t M, int64_t width, int64_t threads);
void add_rms_norm(const bf16* x, const bf16* residual, bf16* total, const bf16* weight, bf16* plain, int8_t* values,
                  float* scales, int32_t* excess, int64_t M, int64_t width, float eps, int64_t threads);
void silu_mul(const bf16* gate_up, bf16* plain, int8_t* values, float* scales, int32_t* excess, int64_t M, int64_t width,
              int64_t threads);
void rope_write(bf16* qkv, const float* cos, const float* sin, char* pages, const int64_t* slots, const float* head_norm,
                float eps, int64_t M, int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary, int64_t int8,
                int64_t threads);
void attend(const bf16* queries, int64_t stride, const char* pages, bf16* out, const int64_t* spans, int64_t count,
            const int64_t* table, const float* sinks, const int64_t* ends, int64_t heads, int64_t kv_heads, int64_t dim,
            int64_t value_dim, int64_t int8, int64_t window, float scale, float softcap, int64_t threads);
void lora(const bf16* x, bf16* y, int64_t into, int64_t out, const Adapted* adapted, int64_t site, bf16* inner, int64_t threads);

}  // extern "C"
