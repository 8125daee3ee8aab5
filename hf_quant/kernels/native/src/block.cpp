#include "block.h"

#include <cstring>

#include "parallel.h"

namespace hfq {

namespace {

// Each product asks for what it reads some KB ahead, but for its first KB nobody has asked: a third of a small product.
void prefetch_start(const Product* p) {
#if defined(__GNUC__)
  if (p == nullptr) return;
  const int64_t codes = min64(p->N * p->row_bytes, 8192);
  const int64_t scales = min64(p->N / p->scale_rows * p->groups * element_size(p->scale_dtype), 2048);
  for (int64_t at = 0; at < codes; at += 64) __builtin_prefetch(p->qdata + at, 0, 2);
  for (int64_t at = 0; at < scales; at += 64) __builtin_prefetch(static_cast<const char*>(p->scale) + at, 0, 2);
#endif
}

int64_t whole_lines(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

Cache read_of(const AppendedHeads& heads, const BlockCall& call) {
  const int64_t first = call.column * heads.scale_token * element_size(heads.scale_dtype);
  Cache cache{};
  cache.codes = heads.codes + call.column * heads.code_token;
  cache.code_batch = heads.code_batch;
  cache.code_head = heads.code_head;
  cache.code_token = heads.code_token;
  cache.scale = static_cast<const char*>(heads.scale) + first;
  cache.offset = heads.offset == nullptr ? nullptr : static_cast<const char*>(heads.offset) + first;
  cache.scale_dtype = heads.scale_dtype;
  cache.scale_batch = heads.scale_batch;
  cache.scale_head = heads.scale_head;
  cache.scale_token = heads.scale_token;
  cache.scale_group = heads.scale_group;
  return cache;
}

// Keys or values of tokens, one after the other, as they are.
Cache values_of(const void* x, const Attention& p) {
  Cache cache{};
  cache.codes = static_cast<const uint8_t*>(x);
  cache.code_head = p.D * element_size(p.q_dtype);
  cache.code_token = p.H_kv * cache.code_head;
  cache.code_batch = p.S * cache.code_token;
  return cache;
}

}  // namespace

const Product* Block::product_from(size_t step, const Block* following) const {
  for (; step < steps_.size(); ++step)
    if (steps_[step].kind == BlockStep::PRODUCT) return steps_[step].routed ? nullptr : &steps_[step].product;
  return following == nullptr ? nullptr : following->product_from(0, nullptr);
}

bool Block::run(const Kernels& kernels, const BlockCall& call, void* const* arguments) const {
  std::vector<void*> at(arguments, arguments + num_arguments_);
  int64_t bytes = 0;
  for (size_t i = num_arguments_; i < buffers_.size(); ++i)
    bytes += whole_lines(bytes_of(i, call.M));
  int64_t heads = 0, experts = 0, chosen = 0;
  for (const BlockStep& step : steps_) {
    heads = max64(heads, step.heads);
    experts = max64(experts, step.router.experts);
    chosen = max64(chosen, step.router.chosen);
  }
  const int64_t pairs = call.M * chosen, numbers = call.M * heads + experts + 2 * pairs;
  char* scratch = static_cast<char*>(thread_scratch(3, static_cast<size_t>(bytes + numbers * 4)));
  if (scratch == nullptr) return false;
  BlockScratch more{};
  more.lse = reinterpret_cast<float*>(scratch + bytes);
  more.routing.weights = more.lse + call.M * heads;
  more.routing.places = reinterpret_cast<int32_t*>(more.routing.weights + pairs);
  more.routing.ends = more.routing.places + pairs;
  more.chosen = chosen;
  for (size_t i = num_arguments_; i < buffers_.size(); ++i) {
    at.push_back(scratch);
    scratch += whole_lines(bytes_of(i, call.M));
  }
  for (size_t i = 0; i < steps_.size();) {
    size_t done = 1;
    if (steps_[i].kind == BlockStep::PRODUCT) {
      done = products(kernels, call, i, at.data(), more);
    } else if (!run(kernels, call, steps_[i], at.data(), more)) {
      return false;
    }
    if (done == 0) return false;
    i += done;
  }
  return true;
}

bool Block::run(const Kernels& kernels, const BlockCall& call, const BlockStep& step, void* const* at,
                const BlockScratch& scratch) const {
  const int from = step.from[0], to = step.to;
  switch (step.kind) {
    case BlockStep::NORM: {
      NormRows n = step.norm;
      n.rows = call.M * buffers_[from].width / n.width;
      n.x = at[from];
      n.y = at[to];
      n.dtype = buffers_[from].dtype;
      n.threads = call.threads;
      kernels.norm_rows(n);
      return true;
    }
    case BlockStep::TURN: {
      TurnRows t = step.turn;
      t.rows = call.M;
      t.heads = buffers_[to].width / t.width;
      t.x = at[to];
      t.dtype = buffers_[to].dtype;
      t.cos = at[step.from[1]];
      t.sin = at[step.from[2]];
      t.angle_dtype = buffers_[step.from[1]].dtype;
      t.stride = call.angle_stride;
      t.threads = call.threads;
      kernels.turn_rows(t);
      return true;
    }
    case BlockStep::GATE: {
      GateRows g = step.gate;
      const int64_t values = call.M * buffers_[to].width;
      g.dtype = buffers_[from].dtype;
      g.x = at[from];
      g.y = at[to];
      if (step.from[1] == from) {  // both, side by side
        g.rows = values / g.width;
        g.stride = 2 * g.width;
        g.up = static_cast<const char*>(g.x) + g.width * element_size(g.dtype);
      } else {
        g.rows = 1;
        g.stride = g.width = values;
        g.up = step.from[1] < 0 ? nullptr : at[step.from[1]];
      }
      g.threads = call.threads;
      kernels.gate_rows(g);
      return true;
    }
    case BlockStep::ADD:
      kernels.add_rows({call.M * buffers_[to].width, from < 0 ? nullptr : at[from], at[step.from[1]], at[to],
                        buffers_[to].dtype, step.scale, call.threads});
      return true;
    case BlockStep::APPEND: append(kernels, call, step, at); return true;
    case BlockStep::ROUTE:
      return route(kernels, step.router, call.M, at[from], buffers_[from].dtype, call.threads, scratch.routing, at[to]);
    case BlockStep::COMBINE:
      kernels.combine_rows({call.M, buffers_[to].width, scratch.chosen, at[from], at[to], buffers_[to].dtype,
                            scratch.routing.places, scratch.routing.weights, step.rounds, call.threads});
      return true;
    case BlockStep::WEIGH:
      return weigh(kernels, step.small, call.M, at[from], buffers_[from].dtype, call.threads, buffers_[to].width,
                   at[to]);
    case BlockStep::PICK: {
      const int64_t size = element_size(buffers_[from].dtype), groups = buffers_[from].width / step.group;
      for (int64_t i = 0; i < call.M * groups; ++i) {
        const int64_t column = i / groups * buffers_[to].width + step.column + i % groups * step.width;
        memcpy(static_cast<char*>(at[to]) + column * size,
               static_cast<const char*>(at[from]) + (i * step.group + step.first) * size,
               static_cast<size_t>(step.width * size));
      }
      return true;
    }
    case BlockStep::SMALL: {
      SmallProduct p = step.small;
      p.M = call.M;
      p.x = at[from];
      p.dtype = buffers_[from].dtype;
      p.threads = call.threads;
      if (buffers_[to].dtype != F32) {
        p.y = static_cast<float*>(thread_scratch(5, static_cast<size_t>(p.M * p.N * 4)));
        p.rounded = at[to];
      } else {
        p.y = static_cast<float*>(at[to]);
      }
      return p.y != nullptr && kernels.small_product(p);
    }
    case BlockStep::HEADS: {
      Attention p = step.rows;
      p.S = call.M;
      p.q = at[from];
      p.q_dtype = buffers_[from].dtype;
      p.q_position = buffers_[from].width;
      p.q_head = buffers_[from].width / p.H;
      p.y = at[to];
      p.y_position = buffers_[to].width;
      p.y_head = buffers_[to].width / p.H;
      p.threads = call.threads;
      return kernels.attention(p);
    }
    case BlockStep::CONVOLVE: {
      ConvolveRows c = step.convolve;
      c.sequences = call.sequences;
      c.tokens = call.M / call.sequences;
      c.width = buffers_[from].width;
      c.x = at[from];
      c.state = at[step.state];
      c.y = at[to];
      c.dtype = buffers_[from].dtype;
      c.threads = call.threads;
      kernels.convolve_rows(c);
      return true;
    }
    case BlockStep::DELTA: {
      DeltaRows d = step.delta;
      d.sequences = call.sequences;
      d.tokens = call.M / call.sequences;
      d.x = at[from];
      d.a = at[step.from[1]];
      d.b = at[step.from[2]];
      d.state = static_cast<float*>(at[step.state]);
      d.y = at[to];
      d.dtype = buffers_[from].dtype;
      d.a_dtype = buffers_[step.from[1]].dtype;
      d.b_dtype = buffers_[step.from[2]].dtype;
      d.threads = call.threads;
      kernels.delta_rows(d);
      return true;
    }
    case BlockStep::SCAN: {
      ScanRows s = step.scan;
      s.sequences = call.sequences;
      s.tokens = call.M / call.sequences;
      s.x = at[from];
      s.step = at[step.from[1]];
      s.inputs = at[step.from[2]];
      s.x_width = buffers_[from].width;
      s.inputs_width = buffers_[step.from[2]].width;
      s.state = static_cast<float*>(at[step.state]);
      s.y = at[to];
      s.dtype = buffers_[from].dtype;
      s.step_dtype = buffers_[step.from[1]].dtype;
      s.threads = call.threads;
      kernels.scan_rows(s);
      return true;
    }
    default: return attend(kernels, call, step, at, scratch.lse);
  }
}

size_t Block::products(const Kernels& kernels, const BlockCall& call, size_t first, void* const* at,
                       const BlockScratch& scratch) const {
  Product siblings[kMaxSiblings];
  size_t count = 0;
  for (size_t i = first; i < steps_.size() && count < kMaxSiblings; ++i) {
    const BlockStep& step = steps_[i];
    const int from = step.from[0], to = step.to;
    if (step.kind != BlockStep::PRODUCT || from != steps_[first].from[0] || step.routed != steps_[first].routed) break;
    Product& p = siblings[count] = step.product;
    p.M = call.M;
    if (step.routed) {
      p.M *= scratch.chosen;
      p.ends = scratch.routing.ends;
    }
    p.x = at[from];
    p.x_dtype = buffers_[from].dtype;
    p.y = at[to];
    p.y_dtype = buffers_[to].dtype;
    p.threads = call.threads;
    if (p.compute == BY_BF16 && !call.by_bf16) p.compute = BY_F32;
    if (count > 0) {
      if (!kernels.joins_siblings || !share_x(siblings[0], p)) break;
      siblings[count - 1].sibling = &p;
      prefetch_start(&p);
    }
    ++count;
    if (to == from) break;
  }
  prefetch_start(product_from(first + count, call.following));
  return multiply(kernels, siblings[0]) ? count : 0;
}

void Block::append(const Kernels& kernels, const BlockCall& call, const BlockStep& step, void* const* at) const {
  Append p{};
  p.B = call.sequences;
  p.H = step.shared_heads;
  p.S = call.M / call.sequences;
  p.start = call.column + call.tokens - p.S;
  p.begins = call.past < 0 && call.cache->layout != VALUES;
  p.first_lacks = p.begins ? call.cache->first : nullptr;
  p.starts = call.cache->starts;
  p.kept = call.cache->kept.k == nullptr ? nullptr : &call.cache->kept;
  p.position = call.past + call.tokens - 1;
  p.layout = call.cache->layout;
  p.x_dtype = buffers_[step.from[0]].dtype;
  p.k = call.cache->k;
  p.v = call.cache->v;
  AppendedHeads* both[] = {&p.k, &p.v};
  for (int i = 0; i < 2; ++i) {
    both[i]->x = at[step.from[i]];
    both[i]->x_head = both[i]->D;
    both[i]->x_token = p.H * both[i]->D;
    both[i]->x_batch = p.S * both[i]->x_token;
  }
  p.threads = call.threads;
  kernels.append(p);
}

bool Block::attend(const Kernels& kernels, const BlockCall& call, const BlockStep& step, void* const* at,
                   float* lse) const {
  const BlockCache& cache = *call.cache;
  Attention p{};
  p.B = call.sequences;
  p.H = step.heads;
  p.H_kv = step.shared_heads;
  p.S = call.M / call.sequences;
  p.T = call.tokens;
  p.D = cache.k.D;
  p.q = at[step.from[0]];
  p.q_dtype = buffers_[step.from[0]].dtype;
  p.q_head = p.y_head = p.D;
  p.q_position = p.y_position = p.H * p.D;
  p.q_batch = p.y_batch = p.S * p.q_position;
  p.y = at[step.to];
  p.lse = lse;
  p.by_bf16 = call.by_bf16;
  if (call.past < 0) {
    p.layout = VALUES;
    p.groups = 1;
    p.group_size = p.D;
    p.k = values_of(at[step.from[1]], p);
    p.v = values_of(at[step.from[2]], p);
  } else {
    p.layout = cache.layout;
    p.levels = cache.levels;
    p.equally_spaced = cache.equally_spaced;
    p.groups = cache.k.groups;
    p.group_size = p.D / p.groups;
    p.rotates = cache.k.rotates;
    p.rotates_values = cache.v.rotates;
    p.frame = cache.k.frame;
    p.first = cache.first;
    p.starts = cache.starts;
    p.past = call.past;
    p.kept = cache.kept.k == nullptr ? nullptr : &cache.kept;
    p.k = read_of(cache.k, call);
    p.v = read_of(cache.v, call);
  }
  Attention more = p;
  if (step.is_latent) {
    p.v = p.k;
    p.rotates_values = p.rotates;
    p.shares = true;
    p.more = &more;
    more.D = cache.v.D;
    more.groups = cache.v.groups;
    more.group_size = more.D / more.groups;
    more.q = at[step.from[1]];
    more.q_head = more.D;
    more.q_position = p.H * more.D;
    more.q_batch = p.S * more.q_position;
    more.rotates = cache.v.rotates;
    more.frame = nullptr;
    more.k = more.v;
  }
  p.mask = call.mask;
  p.mask_dtype = call.mask_dtype;
  p.mask_batch = call.mask_batch;
  p.mask_head = call.mask_head;
  p.mask_position = call.mask_position;
  p.causal = call.causal;
  p.window = call.causal ? step.window : 0;
  p.scale = step.scale;
  p.softcap = step.softcap;
  p.sinks = step.sinks;
  p.sinks_dtype = step.sinks_dtype;
  p.threads = call.threads;
  return kernels.attention(p);
}

}  // namespace hfq
