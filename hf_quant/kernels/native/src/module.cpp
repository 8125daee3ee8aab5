// The Python module: numbers in, nothing but numbers and names out. Its callers check every argument.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "arguments.h"
#include "block.h"
#include "kernels.h"
#include "parallel.h"
#include "unchanged.h"

namespace {

using namespace hfq;

// The instruction sets that were compiled in and that this CPU has, best first.
const Kernels* available[kMostSets];
int num_available = 0;
const Kernels* active = nullptr;
bool has_bf16 = false;

bool multiplies_bf16() { return active->by_bf16 && has_bf16; }

// What a weight is told by: `weight_arguments` of the Python side.
void read_weight(Arguments& a, Product& p) {
  p.layout = a.integer();
  p.levels = a.pointer<const float>();
  p.group_size = a.number();
  p.groups = a.number();
  p.qdata = a.pointer<const uint8_t>();
  p.row_bytes = a.number();
  p.scale = a.pointer<const void>();
  p.scale_dtype = a.integer();
  p.scale_stride = a.number();
  p.scale_rows = a.number();
  p.zero = a.pointer<const uint8_t>();
  p.global_scale = a.pointer<const float>();
  p.experts = a.number();
  p.expert_qdata = a.number();
  p.expert_scale = a.number();
  p.expert_bias = a.number();
  p.input_scale = a.pointer<const float>();
}

// A weight, and what all products with it have in common. Its memory must live as long as it is used.
void forget(PyObject* prepared) { delete static_cast<Product*>(PyCapsule_GetPointer(prepared, nullptr)); }

PyObject* prepare(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  Product p{};
  p.N = a.number();
  p.x_stride = p.K = a.number();
  p.diagonal = a.pointer<const float>();
  p.block = a.number();
  p.offsets = a.pointer<const float>();
  read_weight(a, p);
  return a.finish() ? PyCapsule_New(new Product(p), nullptr, forget) : nullptr;
}

PyObject* matmul(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const void* prepared = count > 0 ? PyCapsule_GetPointer(args[0], nullptr) : nullptr;
  if (prepared == nullptr) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "too few arguments");
    return nullptr;
  }
  Arguments a(args + 1, count - 1);
  Product p = *static_cast<const Product*>(prepared);
  p.M = a.number();
  p.x = a.pointer<const void>();
  p.x_dtype = a.integer();
  p.row_scale = a.pointer<const float>();
  p.y = a.pointer<void>();
  p.y_dtype = a.integer();
  p.bias = a.pointer<const void>();
  p.bias_dtype = a.integer();
  p.ends = a.pointer<const int32_t>();
  p.threads = a.integer();
  p.compute = a.integer();
  if (!a.finish()) return nullptr;
  if (p.compute == BY_BF16 && !multiplies_bf16()) p.compute = BY_F32;
  bool ok;
  Py_BEGIN_ALLOW_THREADS ok = multiply(*active, p);
  Py_END_ALLOW_THREADS return done(ok);
}

PyObject* dequantize(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  Product p{};
  p.N = a.number();
  p.K = a.number();
  p.y = a.pointer<void>();
  p.y_dtype = a.integer();
  p.threads = a.integer();
  read_weight(a, p);
  if (!a.finish()) return nullptr;
  bool ok;
  Py_BEGIN_ALLOW_THREADS ok = active->dequantize(p);
  Py_END_ALLOW_THREADS return done(ok);
}

PyObject* quantize_rows(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  RowQuantization q{};
  q.M = a.number();
  q.K = a.number();
  q.x = a.pointer<const void>();
  q.x_dtype = a.integer();
  q.x_stride = a.number();
  q.diagonal = a.pointer<const float>();
  q.block = a.number();
  q.input_scale = a.pointer<const float>();
  q.codes = a.pointer<int8_t>();
  q.scales = a.pointer<float>();
  q.y = a.pointer<void>();
  q.y_dtype = a.integer();
  q.key = a.pointer<const uint32_t>();
  q.e4m3 = a.integer() != 0;
  q.threads = a.integer();
  if (!a.finish()) return nullptr;
  bool ok;
  Py_BEGIN_ALLOW_THREADS ok = active->quantize_rows(q);
  Py_END_ALLOW_THREADS return done(ok);
}

void read_cache(Arguments& a, Cache& c) {
  c.codes = a.pointer<const uint8_t>();
  c.code_batch = a.number();
  c.code_head = a.number();
  c.code_token = a.number();
  c.scale = a.pointer<const void>();
  c.offset = a.pointer<const void>();
  c.scale_dtype = a.integer();
  c.scale_batch = a.number();
  c.scale_head = a.number();
  c.scale_token = a.number();
  c.scale_group = a.number();
}

// The queries of an attention, and how the codes lie that they meet.
void read_queries(Arguments& a, Attention& p) {
  p.D = a.number();
  p.groups = a.number();
  p.group_size = a.number();
  p.q = a.pointer<const void>();
  p.q_batch = a.number();
  p.q_head = a.number();
  p.q_position = a.number();
  p.rotates = a.integer() != 0;
}

void read_layout(Arguments& a, Attention& p) {
  p.layout = a.integer();
  p.levels = a.pointer<const float>();
  p.equally_spaced = a.integer() != 0;
}

// Rows of codes of each head, which are multiplied from one side: all but rows of x and of the result.
void read_head_rows(Arguments& a, Attention& p) {
  p.part = a.integer() != 0 ? SUMS : SCORES;
  p.B = 1;
  p.H = p.H_kv = a.number();
  p.T = a.number();
  p.D = a.number();
  p.groups = a.number();
  p.group_size = a.number();
  p.diagonal = a.pointer<const float>();
  p.block = a.number();
  read_layout(a, p);
  read_cache(a, p.k);
  p.v = p.k;
  p.scale = 1.0f;
  p.global_scale = a.pointer<const float>();
}

// Products of each head with rows of codes of its own: SCORES or SUMS of an attention.
PyObject* head_products(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  Attention p{};
  read_head_rows(a, p);
  p.S = a.number();
  p.q = a.pointer<const void>();
  p.q_dtype = a.integer();
  p.q_position = a.number();
  p.q_head = a.number();
  p.y = a.pointer<void>();
  p.y_position = a.number();
  p.y_head = a.number();
  p.threads = a.integer();
  if (!a.finish()) return nullptr;
  bool ok;
  Py_BEGIN_ALLOW_THREADS ok = active->attention(p);
  Py_END_ALLOW_THREADS return done(ok);
}

PyObject* attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  Attention p{};
  p.B = a.number();
  p.H = a.number();
  p.H_kv = a.number();
  p.S = a.number();
  p.T = a.number();
  p.q_dtype = a.integer();
  read_layout(a, p);
  read_queries(a, p);
  p.rotates_values = a.integer() != 0;
  p.frame = a.pointer<const float>();
  p.first = a.pointer<const float>();
  p.starts = a.pointer<const int64_t>();
  p.y = a.pointer<void>();
  p.y_batch = a.number();
  p.y_head = a.number();
  p.y_position = a.number();
  p.lse = a.pointer<float>();
  read_cache(a, p.k);
  read_cache(a, p.v);
  p.mask = a.pointer<const void>();
  p.mask_dtype = a.integer();
  p.mask_batch = a.number();
  p.mask_head = a.number();
  p.mask_position = a.number();
  p.causal = a.integer() != 0;
  p.window = a.number();
  p.scale = bits_to_float(static_cast<uint32_t>(a.number()));
  p.softcap = bits_to_float(static_cast<uint32_t>(a.number()));
  p.sinks = a.pointer<const void>();
  p.sinks_dtype = a.integer();
  p.threads = a.integer();
  p.by_bf16 = multiplies_bf16();
  p.shares = a.integer() != 0;
  Attention more = p;
  if (p.shares) {
    read_queries(a, more);
    read_cache(a, more.k);
    more.frame = nullptr;
    p.more = &more;
  }
  if (!a.finish()) return nullptr;
  bool ok;
  Py_BEGIN_ALLOW_THREADS ok = active->attention(p);
  Py_END_ALLOW_THREADS return done(ok);
}

void read_appended(Arguments& a, AppendedHeads& heads) {
  heads.D = a.number();
  heads.groups = a.number();
  heads.rotates = a.integer() != 0;
  heads.frame = a.pointer<float>();
  heads.x = a.pointer<const void>();
  heads.x_batch = a.number();
  heads.x_head = a.number();
  heads.x_token = a.number();
  a.number();  // 1
  const int64_t element = a.number();
  heads.codes = a.pointer<uint8_t>();
  heads.code_batch = a.number() * element;
  heads.code_head = a.number() * element;
  heads.code_token = a.number() * element;
  heads.code_element = a.number() * element;
  heads.scale_dtype = a.integer();
  heads.scale = a.pointer<void>();
  heads.scale_batch = a.number();
  heads.scale_head = a.number();
  heads.scale_token = a.number();
  heads.scale_group = a.number();
  heads.offset = a.pointer<void>();
  heads.offset_batch = a.number();
  heads.offset_head = a.number();
  heads.offset_token = a.number();
  heads.offset_group = a.number();
}

PyObject* append(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  Append p{};
  p.B = a.number();
  p.H = a.number();
  p.S = a.number();
  p.start = a.number();
  p.layout = a.integer();
  p.x_dtype = a.integer();
  p.begins = a.integer() != 0;
  p.first_lacks = a.pointer<float>();
  p.starts = a.pointer<const int64_t>();
  read_appended(a, p.k);
  read_appended(a, p.v);
  p.threads = a.integer();
  if (!a.finish()) return nullptr;
  Py_BEGIN_ALLOW_THREADS active->append(p);
  Py_END_ALLOW_THREADS return done(true);
}

// Returns whether every weight is finite.
PyObject* quantize(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  WeightQuantization q{};
  q.matrices = a.number();
  q.N = a.number();
  q.K = a.number();
  q.group_size = a.number();
  q.groups = a.number();
  q.weight = a.pointer<const void>();
  q.weight_dtype = a.integer();
  q.matrix_stride = a.number();
  q.row_stride = a.number();
  q.qdata = a.pointer<uint8_t>();
  q.row_bytes = a.number();
  q.layout = a.integer();
  q.scale = a.pointer<void>();
  q.scale_dtype = a.integer();
  q.zero = a.pointer<uint8_t>();
  q.global_scale = a.pointer<const float>();
  q.low = a.integer();
  q.high = a.integer();
  q.exponent_bits = a.integer();
  q.mantissa_bits = a.integer();
  q.exponent_bias = a.integer();
  q.levels = a.pointer<const float>();
  const float* factors = a.pointer<const float>();
  q.num_shrinks = a.integer();
  q.num_steps = a.integer();
  q.turns = a.integer();
  q.mirrors = a.integer();
  q.moves = a.integer();
  q.fits = a.integer();
  q.norm = a.integer();
  q.threads = a.integer();
  if (!a.finish()) return nullptr;
  q.max = factors[0];
  q.shrinks = factors + 1;
  q.steps = q.shrinks + q.num_shrinks;
  bool ok, finite;
  Py_BEGIN_ALLOW_THREADS ok = active->quantize(q, &finite);
  Py_END_ALLOW_THREADS return ok ? PyBool_FromLong(finite) : PyErr_NoMemory();
}

PyObject* adam_step(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  AdamStep s{};
  s.N = a.number();
  s.K = a.number();
  s.param = a.pointer<void>();
  s.param_dtype = a.integer();
  s.grad = a.pointer<const void>();
  s.grad_dtype = a.integer();
  s.states = a.integer();
  s.exp_avg = a.pointer<void>();
  s.exp_avg_sq = a.pointer<void>();
  s.exp_avg_scale = a.pointer<float>();
  s.exp_avg_sq_scale = a.pointer<float>();
  s.row = a.number();
  s.column = a.number();
  s.stochastic = a.integer() != 0;
  s.key[0] = static_cast<uint32_t>(a.number());
  s.key[1] = static_cast<uint32_t>(a.number());
  s.factors = a.pointer<const float>();
  s.threads = a.integer();
  if (!a.finish()) return nullptr;
  Py_BEGIN_ALLOW_THREADS active->adam_step(s);
  Py_END_ALLOW_THREADS return done(true);
}

PyObject* fake_quantize(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  FakeQuantization f{};
  f.N = a.number();
  f.K = a.number();
  f.group_size = a.number();
  f.groups = a.number();
  f.weight = a.pointer<const void>();
  f.weight_dtype = a.integer();
  f.scale = a.pointer<const float>();
  f.zero = a.pointer<const uint8_t>();
  f.low = a.integer();
  f.high = a.integer();
  f.exponent_bits = a.integer();
  f.mantissa_bits = a.integer();
  f.exponent_bias = a.integer();
  f.levels = a.pointer<const float>();
  const float* bounds = a.pointer<const float>();
  f.grad = a.pointer<const void>();
  f.grad_dtype = a.integer();
  f.result = a.pointer<void>();
  f.grad_scale = a.pointer<float>();
  f.threads = a.integer();
  if (!a.finish()) return nullptr;
  f.max = bounds[0];
  f.inside_low = bounds[1];
  f.inside_high = bounds[2];
  bool ok;
  Py_BEGIN_ALLOW_THREADS ok = active->fake_quantize(f);
  Py_END_ALLOW_THREADS return done(ok);
}

PyObject* quantize_two_way(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  TwoWayQuantization q{};
  q.M = a.number();
  q.K = a.number();
  q.x = a.pointer<const void>();
  q.x_dtype = a.integer();
  q.x_stride = a.number();
  q.codes = a.pointer<int8_t>();
  q.row_scale = a.pointer<float>();
  q.codes_t = a.pointer<int8_t>();
  q.column_scale = a.pointer<float>();
  q.threads = a.integer();
  if (!a.finish()) return nullptr;
  bool ok;
  Py_BEGIN_ALLOW_THREADS ok = active->quantize_two_way(q);
  Py_END_ALLOW_THREADS return done(ok);
}

PyObject* scale_sums(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  ScaledSums s{};
  s.M = a.number();
  s.N = a.number();
  s.sums = a.pointer<const int32_t>();
  s.row_scale = a.pointer<const float>();
  s.column_scale = a.pointer<const float>();
  s.bias = a.pointer<const float>();
  s.y = a.pointer<void>();
  s.y_dtype = a.integer();
  s.threads = a.integer();
  if (!a.finish()) return nullptr;
  Py_BEGIN_ALLOW_THREADS active->scale_sums(s);
  Py_END_ALLOW_THREADS return done(true);
}

PyObject* requantize_rows(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  RowUpdate u{};
  u.N = a.number();
  u.K = a.number();
  u.codes = a.pointer<int8_t>();
  u.scale = a.pointer<float>();
  u.values = a.pointer<const float>();
  u.row = a.number();
  u.stochastic = a.integer() != 0;
  u.key[0] = static_cast<uint32_t>(a.number());
  u.key[1] = static_cast<uint32_t>(a.number());
  u.threads = a.integer();
  if (!a.finish()) return nullptr;
  Py_BEGIN_ALLOW_THREADS active->requantize_rows(u);
  Py_END_ALLOW_THREADS return done(true);
}

// A block of a model, see `Block` in block.h; what its steps point to must live as long as it is used.
Block* block_of(PyObject* capsule) { return static_cast<Block*>(PyCapsule_GetPointer(capsule, nullptr)); }

void forget_block(PyObject* capsule) { delete block_of(capsule); }

// The number of arguments, then width and dtype of each buffer.
PyObject* new_block(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  const size_t num_arguments = static_cast<size_t>(a.number());
  std::vector<BlockBuffer> buffers;
  for (Py_ssize_t i = 1; i + 1 < count; i += 2) {
    const int64_t width = a.number();
    buffers.push_back({width, a.integer()});
  }
  return a.finish() ? PyCapsule_New(new Block(std::move(buffers), num_arguments), nullptr, forget_block) : nullptr;
}

void read_small(Arguments& a, SmallProduct& p) {
  p.N = a.number();
  p.K = a.number();
  p.weight = a.pointer<const void>();
  p.weight_dtype = a.integer();
  p.bias = a.pointer<const void>();
  p.bias_dtype = a.integer();
  p.rounds = a.integer() != 0;
}

void read_router(Arguments& a, Router& r) {
  read_small(a, r.product);
  r.experts = r.product.N;
  r.chosen = a.number();
  r.correction = a.pointer<const void>();
  r.correction_dtype = a.integer();
  r.by_sigmoid = a.integer() != 0;
  r.normalizes = a.integer() != 0;
  r.factor = bits_to_float(static_cast<uint32_t>(a.number()));
  r.rounds_weights = a.integer() != 0;
  r.groups = a.number();
  r.chosen_groups = a.number();
  r.summed = a.number();
  r.outside = bits_to_float(static_cast<uint32_t>(a.number()));
}

// Adds a step to a block: its kind, buffers, and numbers of its own; a product begins with a prepared weight.
PyObject* add_step(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Block* block = count > 1 ? block_of(args[0]) : nullptr;
  if (block == nullptr) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "too few arguments");
    return nullptr;
  }
  BlockStep step{};
  if (args[1] != Py_None) {
    const void* prepared = PyCapsule_GetPointer(args[1], nullptr);
    if (prepared == nullptr) return nullptr;
    step.product = *static_cast<const Product*>(prepared);
  }
  Arguments a(args + 2, count - 2);
  step.kind = static_cast<BlockStep::Kind>(a.integer());
  for (int& from : step.from) from = a.integer();
  step.to = a.integer();
  switch (step.kind) {
    case BlockStep::PRODUCT:
      step.product.bias = a.pointer<const void>();
      step.product.bias_dtype = a.integer();
      step.product.compute = a.integer();
      step.routed = a.integer() != 0;
      break;
    case BlockStep::NORM:
      step.norm.width = a.number();
      step.norm.weight = a.pointer<const void>();
      step.norm.weight_dtype = a.integer();
      step.norm.bias = a.pointer<const void>();
      step.norm.bias_dtype = a.integer();
      step.norm.eps = bits_to_float(static_cast<uint32_t>(a.number()));
      step.norm.plus_one = a.integer() != 0;
      step.norm.rounds_weight = a.integer() != 0;
      step.norm.rounds = a.integer() != 0;
      step.norm.centers = a.integer() != 0;
      break;
    case BlockStep::TURN:
      step.turn.width = a.number();
      step.turn.turned = a.number();
      step.turn.pairs = a.integer();
      step.turn.rounds = a.integer() != 0;
      break;
    case BlockStep::GATE:
      step.gate.activation = a.integer();
      step.gate.width = a.number();
      step.gate.alpha = bits_to_float(static_cast<uint32_t>(a.number()));
      step.gate.limit = bits_to_float(static_cast<uint32_t>(a.number()));
      step.gate.unrounded = a.integer() != 0;
      break;
    case BlockStep::ADD: step.scale = bits_to_float(static_cast<uint32_t>(a.number())); break;
    case BlockStep::ROUTE: read_router(a, step.router); break;
    case BlockStep::COMBINE: step.rounds = a.integer() != 0; break;
    case BlockStep::WEIGH:
    case BlockStep::SMALL: read_small(a, step.small); break;
    case BlockStep::PICK:
      step.group = a.number();
      step.first = a.number();
      step.width = a.number();
      step.column = a.number();
      break;
    case BlockStep::HEADS: read_head_rows(a, step.rows); break;
    case BlockStep::CONVOLVE:
      step.state = a.integer();
      step.convolve.taps = a.number();
      step.convolve.weight = a.pointer<const void>();
      step.convolve.bias = a.pointer<const void>();
      step.convolve.activation = a.integer();
      break;
    case BlockStep::DELTA:
      step.state = a.integer();
      step.delta.key_heads = a.number();
      step.delta.heads = a.number();
      step.delta.key_dim = a.number();
      step.delta.value_dim = a.number();
      step.delta.log_decay = a.pointer<const void>();
      step.delta.decay_dtype = a.integer();
      step.delta.time_bias = a.pointer<const void>();
      step.delta.bias_dtype = a.integer();
      step.delta.eps = bits_to_float(static_cast<uint32_t>(a.number()));
      break;
    case BlockStep::SCAN:
      step.state = a.integer();
      step.scan.heads = a.number();
      step.scan.head_dim = a.number();
      step.scan.state_size = a.number();
      step.scan.groups = a.number();
      step.scan.first = a.number();
      step.scan.is_decay_apart = a.integer() != 0;
      step.scan.log_decay = a.pointer<const void>();
      step.scan.decay_dtype = a.integer();
      step.scan.time_bias = a.pointer<const void>();
      step.scan.bias_dtype = a.integer();
      step.scan.skip = a.pointer<const void>();
      step.scan.skip_dtype = a.integer();
      break;
    default:
      step.heads = a.number();
      step.shared_heads = a.number();
      step.scale = bits_to_float(static_cast<uint32_t>(a.number()));
      step.softcap = bits_to_float(static_cast<uint32_t>(a.number()));
      step.sinks = a.pointer<const void>();
      step.sinks_dtype = a.integer();
      step.window = a.number();
      step.is_latent = a.integer() != 0;
  }
  if (!a.finish()) return nullptr;
  block->add(step);
  Py_RETURN_NONE;
}

void forget_cache(PyObject* capsule) { delete static_cast<BlockCache*>(PyCapsule_GetPointer(capsule, nullptr)); }

PyObject* prepare_cache(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Arguments a(args, count);
  BlockCache cache{};
  cache.layout = a.integer();
  cache.levels = a.pointer<const float>();
  cache.equally_spaced = a.integer() != 0;
  cache.first = a.pointer<float>();
  cache.starts = a.pointer<const int64_t>();
  cache.kept.k = a.pointer<char>();
  cache.kept.v = a.pointer<char>();
  cache.kept.sinks = a.number();
  cache.kept.recents = a.number();
  read_appended(a, cache.k);
  read_appended(a, cache.v);
  return a.finish() ? PyCapsule_New(new BlockCache(cache), nullptr, forget_cache) : nullptr;
}

// What `run_block` and `run_blocks` are told of their call.
void read_call(Arguments& a, BlockCall& call) {
  call.by_bf16 = multiplies_bf16();
  call.M = a.number();
  call.threads = a.integer();
  call.angle_stride = a.number();
  call.sequences = a.number();
}

void read_mask(Arguments& a, BlockCall& call) {
  call.mask = a.pointer<const void>();
  call.mask_dtype = a.integer();
  call.mask_batch = a.number();
  call.mask_head = a.number();
  call.mask_position = a.number();
  call.causal = a.integer() != 0;
}

void read_place(Arguments& a, BlockCall& call) {
  call.column = a.number();
  call.tokens = a.number();
  call.past = a.number();
}

// A block, a cache or None, and the numbers of the call, last the addresses of the block's arguments.
PyObject* run_block(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const Block* block = count > 1 ? block_of(args[0]) : nullptr;
  if (block == nullptr) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "too few arguments");
    return nullptr;
  }
  BlockCall call{};
  Arguments a(args + 2, count - 2);
  read_call(a, call);
  if (args[1] != Py_None) {
    call.cache = static_cast<const BlockCache*>(PyCapsule_GetPointer(args[1], nullptr));
    if (call.cache == nullptr) return nullptr;
    read_place(a, call);
    read_mask(a, call);
  }
  void* arguments[kMaxBlockArguments];
  if (block->num_arguments() > kMaxBlockArguments) {
    PyErr_SetString(PyExc_TypeError, "too many arguments of a block");
    return nullptr;
  }
  for (size_t i = 0; i < block->num_arguments(); ++i) arguments[i] = a.pointer<void>();
  if (!a.finish()) return nullptr;
  bool ok;
  Py_BEGIN_ALLOW_THREADS ok = block->run(*active, call, arguments);
  Py_END_ALLOW_THREADS return done(ok);
}

// Blocks with the arguments (x, cos, sin, y), each of which reads the result of the one before it: tuples of blocks and
// of caches, the numbers of the call and of its mask, the addresses of the first x, of cos, of sin and of the last
// result, and each block's place in its cache.
PyObject* run_blocks(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count < 2 || PyTuple_Size(args[0]) < 1 || PyTuple_Size(args[0]) != PyTuple_Size(args[1])) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "takes a tuple of blocks and one of as many caches");
    return nullptr;
  }
  BlockCall call{};
  Arguments a(args + 2, count - 2);
  read_call(a, call);
  read_mask(a, call);
  void* arguments[4];
  for (void*& argument : arguments) argument = a.pointer<void>();
  std::vector<std::pair<const Block*, BlockCall>> calls;
  size_t bytes = 0;  // of a result
  for (Py_ssize_t i = 0; i < PyTuple_Size(args[0]); ++i) {
    const Block* block = block_of(PyTuple_GetItem(args[0], i));
    call.cache = static_cast<const BlockCache*>(PyCapsule_GetPointer(PyTuple_GetItem(args[1], i), nullptr));
    if (block == nullptr || call.cache == nullptr) return nullptr;
    if (block->num_arguments() != 4) {
      PyErr_SetString(PyExc_TypeError, "needs blocks with four arguments");
      return nullptr;
    }
    read_place(a, call);
    calls.emplace_back(block, call);
    bytes = std::max(bytes, static_cast<size_t>(block->bytes_of(3, call.M)));
  }
  if (!a.finish()) return nullptr;
  bool ok = true, interrupted = false;
  for (size_t i = 0; i + 1 < calls.size(); ++i) calls[i].second.following = calls[i + 1].first;
  std::vector<char> between(2 * bytes);
  void* const last = arguments[3];
  Py_BEGIN_ALLOW_THREADS for (size_t i = 0; i < calls.size() && ok; ++i) {
    arguments[3] = i + 1 < calls.size() ? between.data() + (i % 2) * bytes : last;
    ok = calls[i].first->run(*active, calls[i].second, arguments);
    arguments[0] = arguments[3];
    if (call.M == call.sequences) continue;
    Py_BLOCK_THREADS interrupted = PyErr_CheckSignals() != 0;  // a prompt may take seconds
    Py_UNBLOCK_THREADS ok = ok && !interrupted;
  }
  Py_END_ALLOW_THREADS return interrupted ? nullptr : done(ok);
}

// To be counted up when the arguments of a function change.
PyObject* interface(PyObject*, PyObject*) { return PyLong_FromLong(26); }

PyObject* max_head_dim(PyObject*, PyObject*) { return PyLong_FromLong(kMaxHeadDim); }

PyObject* instruction_sets(PyObject*, PyObject*) {
  PyObject* names = PyTuple_New(num_available);
  for (int i = 0; names != nullptr && i < num_available; ++i)
    PyTuple_SetItem(names, i, PyUnicode_FromString(available[i]->name));
  return names;
}

PyObject* use(PyObject*, PyObject* name) {
  for (int i = 0; i < num_available; ++i) {
    if (PyUnicode_CompareWithASCIIString(name, available[i]->name) == 0) {
      active = available[i];
      Py_RETURN_NONE;
    }
  }
  PyErr_SetString(PyExc_ValueError, "this CPU or this build lacks that instruction set");
  return nullptr;
}

PyObject* has_bf16_dot(PyObject*, PyObject*) {
  return PyBool_FromLong(multiplies_bf16());
}

PyObject* share_threads(PyObject*, PyObject* address) {
  const long long value = PyLong_AsLongLong(address);
  if (value == -1 && PyErr_Occurred()) return nullptr;
  set_gomp_parallel(reinterpret_cast<GompParallel>(static_cast<intptr_t>(value)));
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"matmul", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(matmul)), METH_FASTCALL,
     "One product with a prepared weight, see `Product` in types.h; raises MemoryError."},
    {"prepare", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(prepare)), METH_FASTCALL,
     "A weight for `matmul`, which does not keep its memory alive."},
    {"dequantize", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(dequantize)), METH_FASTCALL,
     "Weights [experts, N, K], see `Kernels` in kernels.h."},
    {"quantize_rows", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(quantize_rows)), METH_FASTCALL,
     "Rows to int8, see `RowQuantization` in kernels.h."},
    {"attention", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(attention)), METH_FASTCALL,
     "Attention over quantized keys and values, see `Attention` in kernels.h; raises MemoryError."},
    {"head_products", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(head_products)), METH_FASTCALL,
     "Products of each head with rows of codes of its own: SCORES or SUMS of `Attention` in kernels.h; raises MemoryError."},
    {"append", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(append)), METH_FASTCALL,
     "New keys and values into a cache of codes, see `Append` in kernels.h."},
    {"quantize", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(quantize)), METH_FASTCALL,
     "Weights to codes, scales and zero points, see `WeightQuantization` in kernels.h; raises MemoryError."},
    {"adam_step", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(adam_step)), METH_FASTCALL,
     "One step of AdamW on a parameter, see `AdamStep` in kernels.h."},
    {"fake_quantize", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fake_quantize)), METH_FASTCALL,
     "Weights as they would be stored, see `FakeQuantization` in kernels.h; raises MemoryError."},
    {"quantize_two_way", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(quantize_two_way)), METH_FASTCALL,
     "A matrix to int8 by rows and by columns, see `TwoWayQuantization` in kernels.h; raises MemoryError."},
    {"scale_sums", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(scale_sums)), METH_FASTCALL,
     "Sums of int8 products to floats, see `ScaledSums` in kernels.h."},
    {"requantize_rows", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(requantize_rows)), METH_FASTCALL,
     "New values of int8 codes, see `RowUpdate` in kernels.h."},
    {"new_block", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(new_block)), METH_FASTCALL,
     "A block of a model without steps, see `Block` in block.h."},
    {"add_step", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(add_step)), METH_FASTCALL,
     "Adds a step to a block, see `BlockStep` in block.h."},
    {"unchanged", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(unchanged)), METH_FASTCALL,
     "Whether dicts hold the same objects, functions return the same numbers, tensors have the same memory, and dicts are "
     "empty, for each tuple."},
    {"read_tensors_by", read_tensors_by, METH_O, "The address of torch's aoti_torch_get_data_ptr, for `unchanged`."},
    {"prepare_cache", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(prepare_cache)), METH_FASTCALL,
     "The tensors of a layer of a cache for `run_block`, which does not keep their memory alive."},
    {"run_block", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_block)), METH_FASTCALL,
     "Runs a block, see `BlockCall` in block.h; raises MemoryError."},
    {"run_blocks", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_blocks)), METH_FASTCALL,
     "Runs blocks one after the other; raises MemoryError."},
    {"max_head_dim", max_head_dim, METH_NOARGS, "Channels of a head that `attention` and `append` take at most."},
    {"interface", interface, METH_NOARGS, "Version of the arguments of the functions."},
    {"instruction_sets", instruction_sets, METH_NOARGS, "Names of the instruction sets that can be used, best first."},
    {"use", use, METH_O, "Use the named instruction set from now on."},
    {"has_bf16_dot", has_bf16_dot, METH_NOARGS, "Whether bf16 is multiplied by instructions for it."},
    {"share_threads", share_threads, METH_O, "Take the threads of the runtime whose GOMP_parallel is at the address."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "Quantized products on CPUs.", -1, methods,
                          nullptr,               nullptr,   nullptr,                       nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
  if (num_available == 0) {
    num_available = find_kernels(available, &has_bf16);
    active = available[0];
  }
  return PyModule_Create(&definition);
}
