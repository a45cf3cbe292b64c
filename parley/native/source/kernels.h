// The kernels that `layers.cpp` calls. Each is described where it is defined. As in BLAS, M is the number of rows, and N
// and K are the numbers of outputs and inputs of a linear layer. Rows for a linear layer are bf16 (`plain`) or int8
// (`values`, `scales` and `excess`, see int8.cpp).
#pragma once
#include "lora.h"
#include "vector.h"

// The norm of rows, as Norm in native/layer_shape.py.
struct Norm {
  const float *weight, *bias;  // [width]; the bias may be null
  int64_t centered;
  float eps;
};

extern "C" {

void linear(const bf16* x, const bf16* packed, const bf16* bias, void* y, int64_t M, int64_t N, int64_t K,
            int64_t as_fp32, int64_t threads);
void int8_linear(const int8_t* x, const float* x_scales, const int32_t* excess, const uint8_t* packed,
                 const float* scales, const bf16* bias, void* y, int64_t M, int64_t N, int64_t K, int64_t as_fp32,
                 int64_t threads);
void grouped_linear(int64_t code, const bf16* x, const uint32_t* packed, const float* scales, const bf16* bias, void* y,
                    int64_t M, int64_t N, int64_t K, int64_t group, int64_t as_fp32, int64_t threads);
void quantize_rows(const bf16* x, int8_t* values, float* scales, int32_t* excess, int64_t M, int64_t width,
                   int64_t threads);
void add_norm(const bf16* x, const bf16* residual, bf16* total, const Norm* after, float scale, float total_scale,
              const Norm* norm, bf16* plain, int8_t* values, float* scales, int32_t* excess, int64_t M, int64_t width,
              int64_t threads);
void activate(const bf16* rows, int64_t activation, int64_t gated, const float* factors, bf16* plain, int8_t* values,
              float* scales, int32_t* excess, int64_t M, int64_t width, int64_t threads);
void rope_write(bf16* qkv, const float* cos, const float* sin, char* pages, const int64_t* slots, const Norm* head_norm,
                int64_t whole, int64_t after, int64_t normed_values, const float* query_scales, int64_t M,
                int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary, int64_t interleaved, int64_t int8,
                int64_t threads);
void attend(const bf16* queries, int64_t stride, const char* pages, bf16* out, const int64_t* spans, int64_t count,
            const int64_t* table, const float* sinks, const float* slopes, const int64_t* visible_ends, int64_t heads,
            int64_t kv_heads, int64_t dim, int64_t value_dim, int64_t int8, int64_t latent, int64_t window,
            int64_t chunk, float scale, float softcap, int64_t threads);
void linear_heads(const bf16* x, const bf16* packed, bf16* y, int64_t M, int64_t heads, int64_t N, int64_t K,
                  int64_t threads);
void write_latents(const bf16* rows, int64_t stride, const Norm* norm, const float* cos, const float* sin, char* pages,
                   const int64_t* slots, int64_t M, int64_t rank, int64_t rotary, int64_t interleaved, int64_t int8,
                   int64_t threads);
void join_queries(const bf16* latents, const bf16* queries, int64_t stride, const float* cos, const float* sin,
                  bf16* out, int64_t M, int64_t heads, int64_t rank, int64_t plain, int64_t rotary, int64_t interleaved,
                  int64_t threads);
void scale_rows(bf16* rows, const float* scales, int64_t M, int64_t width, int64_t threads);
void gather_heads(const bf16* rows, int64_t stride, int64_t size, bf16* to, int64_t M, int64_t heads, int64_t width,
                  int64_t threads);
void scatter_heads(const bf16* from, bf16* rows, int64_t M, int64_t heads, int64_t width, int64_t threads);
void lora(const bf16* x, bf16* y, int64_t in_features, int64_t out_features, const Adapted* adapted, int64_t site,
          bf16* inner, int64_t threads);

}  // extern "C"
