// What an instruction set offers. Returns false if there is no memory for scratch.
#pragma once

#include "types.h"

namespace hfq {

// Rows of x [M, K], transformed as those of a Product, to int8 codes [M, K] and scales [M]; or without codes to y [M, K].
struct RowQuantization {
  int64_t M, K;
  const void* x;
  int x_dtype;
  int64_t x_stride;  // elements from row to row
  const float* diagonal;
  int64_t block;
  const float* input_scale;  // of every row, or null: each has its own
  void* y;
  int y_dtype;
  int8_t* codes;
  float* scales;
  const uint32_t* key;  // of the random bits that codes are rounded by, or null: to nearest
  bool e4m3;            // instead of int8; with a key only, and without input_scale
  int threads;
};

// Quantized keys, or values, of a cache: codes [B, H_kv, T, D], a scale and an offset [B, H_kv, T, groups] of each group.
struct Cache {
  const uint8_t* codes;
  int64_t code_batch, code_head, code_token;  // bytes from one to the next
  const void *scale, *offset;                 // value = level * scale + offset; no offset: null
  int scale_dtype;
  int64_t scale_batch, scale_head, scale_token, scale_group;  // elements, of the offsets as well

  const uint8_t* row(int64_t b, int64_t h, int64_t t) const {
    return codes + b * code_batch + h * code_head + t * code_token;
  }
  // Where the scales (and offsets) of a row begin.
  int64_t scales_of(int64_t b, int64_t h, int64_t t) const {
    return b * scale_batch + h * scale_head + t * scale_token;
  }
};

// The tokens of a cache of codes that lie there as they are, too: keys and values [B, H_kv, sinks + recents + 1, D], of the first
// tokens of each sequence, then a ring of the last ones, in which the token at position p is number p % recents.
struct Kept {
  int64_t sinks, recents;
  char *k, *v;
};

constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMaxBlock = 1024;  // of a Hadamard transform

// y = softmax(cap(q @ k.T * scale) + mask) @ v, and the logarithm of the sum of its exponentials.
// SCORES: y [B, H, S, T] = q @ k.T * scale alone; SUMS: y = q [B, H, S, T] * scale @ v alone. Both take codes, of H = H_kv
// heads, and know nothing of masks and of what keys lack.
enum AttentionPart : int { WHOLE, SCORES, SUMS };

struct Attention {
  AttentionPart part;
  int64_t B, H, H_kv, S, T, D;
  int layout;  // PACKED2, PACKED4, BYTES_INT, BYTES_FLOAT, or VALUES, which have no scales; of parts any but VALUES
  const float* levels;
  bool equally_spaced;         // levels[i] = levels[0] + i
  int64_t groups, group_size;  // of D; group_size a multiple of 16

  const void* q;  // [B, H, S, D], as y; strides in elements
  int q_dtype;
  int64_t q_batch, q_head, q_position;
  bool rotates;         // q, as the keys were, rounded to its dtype
  bool rotates_values;  // they were: so is y
  const float* frame;   // [B, H_kv, 2, D]: q is multiplied by the second row, keys lack the first; null if there is none
  const float* first;   // [B, H_kv, D], added to the key of each sequence's first token; null if there is none
  const int64_t* starts;  // [B]: the first token of each sequence, those before it are padding; null: 0
  int64_t past;           // how many tokens have left in front of token 0: starts count them
  const Kept* kept;       // tokens that are read there, and not as codes; only if S is 1; null: none
  void* y;
  int64_t y_batch, y_head, y_position;
  float* lse;  // [B, H, S]

  Cache k, v;
  // Latent attention: v is k, and y gets what its values lack in their frame, and as the first one.
  bool shares;
  // Its further keys, of D channels of their own, and their queries: what is read of it are D, groups, group_size, q, its
  // strides, rotates and k. Their scores are added to those of the latents. Null if there are none.
  const Attention* more;
  // Of parts, if block is not 0: codes are of rows * diagonal [D], times the Hadamard matrix in each block of columns.
  const float* diagonal;
  int64_t block;
  const float* global_scale;  // of parts: one more factor of all scales, or null
  const void* mask;  // F32 to be added, or INT8 for booleans; null if there is none; strides in elements, of tokens 1
  int mask_dtype;
  int64_t mask_batch, mask_head, mask_position;
  bool causal;     // position i sees tokens up to T - S + i
  int64_t window;  // and of these the last ones; 0: all
  float scale;
  float softcap;      // scores, those of what keys lack included, become softcap * tanh(score / softcap); 0: they do not
  const void* sinks;  // [H]: one more score for each head, with no value, of which lse knows nothing; null: none
  int sinks_dtype;
  int threads;
  bool by_bf16;  // VALUES of bf16 may be multiplied as such
};

// New keys, or values, [B, H, S, D] and the cache that takes their codes; a cache as in `Cache`, but with any strides.
// Of the layout VALUES a cache takes them as they are, and there are no frames, scales and offsets.
struct AppendedHeads {
  int64_t D, groups;
  bool rotates;
  float* frame;  // [B, H, 2, D]: what is taken off x, and what it is divided by; null if there is none
  const void* x;
  int64_t x_batch, x_head, x_token;  // elements
  uint8_t* codes;
  int64_t code_batch, code_head, code_token, code_element;  // bytes; an element is a word of codes, or a byte
  void *scale, *offset;                                     // no offset for bytes
  int scale_dtype;
  int64_t scale_batch, scale_head, scale_token, scale_group;  // elements
  int64_t offset_batch, offset_head, offset_token, offset_group;
};

// Token t becomes token start + t of the caches, all of which are there.
struct Append {
  int64_t B, H, S, start;
  int layout, x_dtype;  // PACKED2, PACKED4, BYTES_INT, BYTES_FLOAT or VALUES
  bool begins;         // the first tokens of a cache: the frame of its keys is found in them, and written
  float* first_lacks;  // [B, H, D]: what the codes of the first key lack, or null
  const int64_t* starts;  // [B], of the first tokens of a cache: as in Attention
  const Kept* kept;       // takes the token as well; only if S is 1; null: there is none
  int64_t position;       // of the token
  AppendedHeads k, v;
  int threads;
};

// Weights [matrices, N, K] to codes, scales and zero points [matrices, N, groups].
struct WeightQuantization {
  int64_t matrices, N, K, group_size, groups;
  const void* weight;
  int weight_dtype;
  int64_t matrix_stride, row_stride;  // elements

  uint8_t* qdata;
  int64_t row_bytes;
  int layout;
  void* scale;
  int scale_dtype;
  uint8_t* zero;              // or null
  const float* global_scale;  // one per matrix, or null

  // The grid: 16 levels, then the 15 midpoints between them, or null; minifloats if there are exponent bits, else
  // integers from low to high.
  int low, high, exponent_bits, mantissa_bits, exponent_bias;
  const float* levels;

  // How scales and zero points are chosen: see hf_quant.algorithms.mse.Search.
  float max;
  const float *shrinks, *steps;
  int num_shrinks, num_steps;
  bool turns, mirrors, moves, fits, norm;
  int threads;
};

enum AdamStates : int { ADAM_F32, ADAM_BF16, ADAM_INT8, ADAM_FP8, ADAM_INT4 };

// A parameter [N, K], its gradient and its moments: `adam_step_` of hf_quant.
struct AdamStep {
  int64_t N, K;
  void* param;
  int param_dtype;
  const void* grad;
  int grad_dtype, states;
  void *exp_avg, *exp_avg_sq;                // [N, K], of 4 bits [N, ceil(K / 2)]
  float *exp_avg_scale, *exp_avg_sq_scale;  // [N, ceil(K / block)], null for floats
  int64_t row, column;                      // of the whole parameter, at which this part of it begins
  bool stochastic;
  uint32_t key[2];
  const float* factors;  // `Coefficients`
  int threads;
};

// Weights [N, K] as they would be stored with the scales [N, groups], or the gradients through that: `fake_quantize`.
struct FakeQuantization {
  int64_t N, K, group_size, groups;
  const void* weight;
  int weight_dtype;
  const float* scale;
  const uint8_t* zero;  // [N, groups], or null
  int low, high, exponent_bits, mantissa_bits, exponent_bias;  // the grid, as in WeightQuantization
  const float* levels;
  float max, inside_low, inside_high;  // what lies between the last two rounds to a level without being clipped

  const void* grad;  // [N, K], of the result; null: forward
  int grad_dtype;
  void* result;       // [N, K] of the weight's dtype: the weight as stored; with `grad` the gradient of the weight
  float* grad_scale;  // [N, groups], with `grad`
  int threads;
};

// x [M, K] to int8 twice, with a scale for each row and for each column: `quantize_rows_and_columns` of hf_quant.
struct TwoWayQuantization {
  int64_t M, K;
  const void* x;
  int x_dtype;
  int64_t x_stride;  // of rows, elements
  int8_t* codes;     // [M, K]
  float* row_scale;
  int8_t* codes_t;  // [K, M], or null: by rows alone
  float* column_scale;
  int threads;
};

// y [M, N] = sums * row_scale * column_scale + bias [N], which may be null.
struct ScaledSums {
  int64_t M, N;
  const int32_t* sums;
  const float *row_scale, *column_scale, *bias;
  void* y;
  int y_dtype;
  int threads;
};

// Values [N, K] written into int8 codes and scales of rows: `requantize_rows_` of hf_quant.
struct RowUpdate {
  int64_t N, K;
  int8_t* codes;
  float* scale;
  const float* values;
  int64_t row;  // of the whole weight, at which this part of it begins
  bool stochastic;
  uint32_t key[2];
  int threads;
};

// y = x / sqrt(mean of x**2 + eps) * weight + bias for each of `rows` rows [width]: RMSNorm
// (https://arxiv.org/abs/1910.07467), or of x less its mean: LayerNorm (https://arxiv.org/abs/1607.06450).
struct NormRows {
  int64_t rows, width;
  const void* x;
  void* y;  // may be x
  int dtype;
  const void *weight, *bias;  // null: ones, zeros
  int weight_dtype, bias_dtype;
  float eps;
  bool centers;
  bool plus_one;  // multiplied by 1 + weight
  bool rounds_weight;  // to its dtype
  bool rounds;    // to dtype before the weight
  int threads;
};

// Pairs of channels that a rotary embedding (https://arxiv.org/abs/2104.09864) turns, and their place in cos and sin.
enum TurnedPairs : int {
  HALVES,     // c and c + turned / 2; at c
  NEIGHBORS,  // 2 i and 2 i + 1; at c
  NEIGHBORS_BY_PAIR,  // the same; at i
  HALVES_BY_PAIR,     // c and c + turned / 2; both at c, below turned / 2
  HALVES_OF_NEIGHBORS,  // 2 i and 2 i + 1, which go to i and i + turned / 2; at c
};

// x [rows, heads, width] in place: the first `turned` channels of each head become x * cos + pair of x * sin.
struct TurnRows {
  int64_t rows, heads, width, turned;
  void* x;
  int dtype;
  const void *cos, *sin;
  int angle_dtype;
  int64_t stride;  // elements of cos and sin from row to row
  int pairs;
  bool rounds;  // products to dtype, before they are added
  int threads;
};

// CLAMPED_PAIRS: of gpt-oss. x [rows, width, 2] holds gate and up, both clamped; (up + 1) * gate * sigmoid(alpha * gate).
enum Activation : int { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, QUICK_GELU, CLAMPED_PAIRS, IDENTITY, SIGMOID };

// y [rows, width] = activation(x), rounded, * up; up may be null.
struct GateRows {
  int64_t rows, width;
  const void *x, *up;
  int64_t stride;  // elements of x and up from row to row
  void* y;
  int dtype, activation;
  float alpha, limit;  // CLAMPED_PAIRS
  int threads;
  bool unrounded;  // activation(x), if there is an up
};

// y [count] = x + more * factor, which is rounded; x null: without it
struct AddRows {
  int64_t count;
  const void *x, *more;
  void* y;
  int dtype;
  float factor;
  int threads;
};

// y [M, N] = x [M, K] @ weight [N, K].T + bias [N] in fp32, then rounded to `dtype`, if so wished.
struct SmallProduct {
  int64_t M, N, K;
  const void* x;
  int dtype;
  const void *weight, *bias;  // no bias: null
  int weight_dtype, bias_dtype;
  float* y;
  void* rounded;  // [M, N] of `dtype`, which gets y, too, or null
  bool rounds;
  int threads;
};

// y [M, width]: the sums of the rows of x that belong to a row, [M * chosen, width] at `places`, times their weights.
struct CombineRows {
  int64_t M, width, chosen;
  const void* x;
  void* y;  // may be x, if it has as many rows
  int dtype;
  const int32_t* places;  // [M, chosen]; null: one after the other
  const float* weights;   // [M, chosen]
  bool rounds;            // products to dtype, before they are added
  int threads;
};

// The next tokens of each of some sequences: a causal convolution of each channel with its last `taps` values, then an
// activation function. Of each token x [width]: x is shifted into the state, and y = activation(round(sum of state *
// weight + bias)). y may be x.
constexpr int64_t kMaxTaps = 8;

struct ConvolveRows {
  int64_t sequences, tokens, width, taps;
  const void* x;    // [sequences, tokens, width]
  void *state, *y;  // [sequences, width, taps] and as x
  const void *weight, *bias;  // [width, taps] and [width], or null
  int dtype;                  // of all
  int activation;
  int threads;
};

// The next tokens of each of some sequences: the gated delta rule (https://arxiv.org/abs/2412.06464), one token after
// the other. With q and k of length 1, q divided by the root of key_dim, in fp32:
//   state = exp(-exp(log_decay) * softplus(a + time_bias)) * state
//   state = state + k (sigmoid(b) * (v - k.T @ state)).T
//   y = q.T @ state
struct DeltaRows {
  int64_t sequences, tokens, key_heads, heads, key_dim, value_dim;  // heads / key_heads heads share one of keys
  const void* x;      // [sequences, tokens, 2 * key_heads * key_dim + heads * value_dim]: q, k, v
  const void *a, *b;  // [sequences, tokens, heads]
  const void *log_decay, *time_bias;  // [heads]
  float* state;  // [sequences, heads, key_dim, value_dim]
  void* y;       // [sequences, tokens, heads * value_dim]
  int dtype, a_dtype, b_dtype, decay_dtype, bias_dtype;  // of x and y, ...
  float eps;  // added to the squared lengths of q and k
  int threads;
};

// The next tokens of each of some sequences: a selective state space (https://arxiv.org/abs/2312.00752, and with one decay for
// all channels of a head https://arxiv.org/abs/2405.21060), one token after the other. For each channel of a head, in fp32:
//   step = softplus(step + time_bias), rounded to dtype
//   state = exp(-exp(log_decay) * step) * state + step * x * B
//   y = state @ C + skip * x
struct ScanRows {
  int64_t sequences, tokens, heads, head_dim, state_size, groups;  // heads / groups heads share B and C
  const void* x;      // rows of x_width, of which the first heads * head_dim are used
  const void* step;   // [sequences, tokens, heads]
  const void* inputs;  // rows of inputs_width, from `first` on B and C, each [groups, state_size]
  int64_t x_width, inputs_width, first;
  const void *log_decay, *time_bias, *skip;  // [heads] or, if `is_decay_apart`, [heads, state_size]; [heads] or null; [heads]
  bool is_decay_apart;
  float* state;  // [sequences, heads, head_dim, state_size]
  void* y;       // [sequences, tokens, heads * head_dim]
  int dtype, step_dtype, decay_dtype, bias_dtype, skip_dtype;  // of x, inputs and y, ...
  int threads;
};

struct Kernels {
  const char* name;
  bool by_bf16;         // whether Product.compute may be BY_BF16
  bool joins_siblings;  // whether `matmul` computes the siblings of a Product
  bool (*matmul)(const Product&);
  // y [experts, N, K] = the weights, rounded once; of the Product only they, y and threads count.
  bool (*dequantize)(const Product&);
  bool (*quantize_rows)(const RowQuantization&);
  bool (*attention)(const Attention&);
  bool (*quantize)(const WeightQuantization&, bool* finite);  // finite: whether every weight is
  void (*append)(const Append&);
  void (*adam_step)(const AdamStep&);
  bool (*fake_quantize)(const FakeQuantization&);
  bool (*quantize_two_way)(const TwoWayQuantization&);
  void (*scale_sums)(const ScaledSums&);
  void (*requantize_rows)(const RowUpdate&);
  void (*norm_rows)(const NormRows&);
  void (*turn_rows)(const TurnRows&);
  void (*gate_rows)(const GateRows&);
  void (*add_rows)(const AddRows&);
  bool (*small_product)(const SmallProduct&);
  void (*combine_rows)(const CombineRows&);
  void (*convolve_rows)(const ConvolveRows&);
  void (*delta_rows)(const DeltaRows&);
  void (*scan_rows)(const ScanRows&);
  void (*sum_groups)(const Product&, float* sums);  // see offsets.h
  void (*multiply_sums)(const Product&, const float* sums, float* rest);
};

constexpr size_t kMaxSiblings = 4;

// y of a product and of its siblings, with the offsets of the weights; false if there is no memory.
bool multiply(const Kernels& kernels, const Product& product);

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2, kAvx512, kAvx512Vnni;
const Kernels* amx_kernels();  // those of AVX-512 with matrix units; null if the CPU, or the system, has none
extern bool (*const kAvxVnniMatmul)(const Product&);  // null if the compiler does not know AVX-VNNI
extern bool (*const kAvxVnniEvexMatmul)(const Product&);
#elif defined(__aarch64__)
extern const Kernels kNeon;
bool has_dot_products();  // which kNeon needs
#endif

// Finds the instruction sets that were compiled in and that this CPU has, best first, and returns how many there are.
// has_bf16: whether the CPU has what the first needs to multiply in bf16.
constexpr int kMostSets = 6;
int find_kernels(const Kernels* (&found)[kMostSets], bool* has_bf16);

}  // namespace hfq
