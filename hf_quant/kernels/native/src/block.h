// A block of a model for few rows of x: products and what lies between them, one step after the other in one call.
#pragma once

#include <vector>

#include "kernels.h"
#include "mixture_route.h"

namespace hfq {

constexpr size_t kMaxBlockArguments = 8;

// Values [M, width]. The first ones are the block's arguments, the others lie in scratch.
struct BlockBuffer {
  int64_t width;
  int dtype;
};

struct BlockStep {
  enum Kind : int { PRODUCT, NORM, TURN, GATE, ADD, APPEND, ATTEND, ROUTE, COMBINE, WEIGH, SMALL, CONVOLVE, DELTA, PICK, SCAN, HEADS } kind;
  int from[3], to;  // buffers; -1: none
  Product product;
  bool routed;  // PRODUCT: of rows that ROUTE has sorted by experts
  NormRows norm;
  TurnRows turn;
  GateRows gate;
  Router router;             // ROUTE
  SmallProduct small;        // WEIGH; SMALL, whose result may be fp32
  ConvolveRows convolve;
  DeltaRows delta;
  ScanRows scan;
  int state;                 // buffer; CONVOLVE, DELTA, SCAN
  int64_t group, first, width, column;  // PICK: columns first..first + width of each group, to `column` and on
  bool rounds;               // COMBINE: products, before they are added
  int64_t heads, shared_heads;  // ATTEND: of queries; APPEND and ATTEND: of keys and values
  float scale, softcap;         // ATTEND: of the scores, see Attention; ADD: scale of what is added
  int64_t window;               // ATTEND: as in Attention
  bool is_latent;               // ATTEND: to latents, the keys of the cache, and to its values, which are more keys
  Attention rows;               // HEADS
  const void* sinks;
  int sinks_dtype;
};

// The tensors of one layer of a cache, which must live as long as it is used.
struct BlockCache {
  int layout;
  const float* levels;
  bool equally_spaced;
  AppendedHeads k, v;
  float* first;  // what is added to the first key, and where that is, see Attention
  const int64_t* starts;
  Kept kept;     // without keys: there is none
};

class Block;

// What steps leave to others.
struct BlockScratch {
  float* lse;  // of ATTEND
  Routing routing;
  int64_t chosen;  // experts of each row
};

// What differs from call to call.
struct BlockCall {
  int64_t M;
  int threads;
  bool by_bf16;             // whether products may compute BY_BF16
  const BlockCache* cache;  // null: no step needs one
  int64_t column, tokens;   // of the cache: the first one in use, and how many are with the new ones
  int64_t past;             // as in Attention; -1: the cache is empty, what it holds of its first tokens is written
  const void* mask;         // as in Attention, [sequences, H or 1, rows of each or 1, tokens]
  int mask_dtype;
  int64_t mask_batch, mask_head, mask_position;
  bool causal;              // in Attention
  int64_t angle_stride;     // elements of cos and sin from row to row
  int64_t sequences;        // rows are one token after the other of each
  const Block* following;   // the block that is run next, or null
};

class Block {
 public:
  Block(std::vector<BlockBuffer> buffers, size_t num_arguments)
      : buffers_(std::move(buffers)), num_arguments_(num_arguments) {}

  size_t num_arguments() const { return num_arguments_; }
  size_t num_buffers() const { return buffers_.size(); }
  int64_t bytes_of(size_t buffer, int64_t M) const {
    return M * buffers_[buffer].width * element_size(buffers_[buffer].dtype);
  }
  void add(const BlockStep& step) { steps_.push_back(step); }
  // `arguments`: the addresses of the block's arguments. Returns false if there is no memory.
  bool run(const Kernels& kernels, const BlockCall& call, void* const* arguments) const;

 private:
  // The first product at or behind a step, or of the block that follows; null: there is none.
  const Product* product_from(size_t step, const Block* following) const;
  bool run(const Kernels& kernels, const BlockCall& call, const BlockStep& step, void* const* at,
           const BlockScratch& scratch) const;
  // The products from a step on that share their x, whose number is returned; 0 if there is no memory.
  size_t products(const Kernels& kernels, const BlockCall& call, size_t first, void* const* at,
                  const BlockScratch& scratch) const;
  bool attend(const Kernels& kernels, const BlockCall& call, const BlockStep& step, void* const* at, float* lse) const;
  void append(const Kernels& kernels, const BlockCall& call, const BlockStep& step, void* const* at) const;

  std::vector<BlockBuffer> buffers_;
  size_t num_arguments_;
  std::vector<BlockStep> steps_;
};

}  // namespace hfq
