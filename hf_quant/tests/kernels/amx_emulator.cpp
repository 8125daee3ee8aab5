// Instructions of matrix units (AMX) for CPUs without them: a handler of the signal that they raise computes what they do.
// A process that loads this library has it. For tests: each instruction takes some microseconds.
#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

struct Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

long calls;
thread_local Shapes shapes;
thread_local uint8_t tiles[8][16][64];
struct sigaction before;

// A VEX-coded instruction of three opcode bytes, 0F 38 and its own.
struct Instruction {
  int prefix, opcode, reg, rm, other;  // prefix: 0 none, 1 66, 2 F3, 3 F2
  bool in_memory;
  uint8_t* address;
  int64_t stride;
  int length;
};

int64_t* register_of(ucontext_t* context, int number) {
  static const int places[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                 REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return reinterpret_cast<int64_t*>(&context->uc_mcontext.gregs[places[number]]);
}

bool decode(ucontext_t* context, Instruction& found) {
  const uint8_t* code = reinterpret_cast<const uint8_t*>(context->uc_mcontext.gregs[REG_RIP]);
  if (code[0] != 0xC4 || (code[1] & 0x1f) != 2) return false;
  const int r = code[1] & 0x80 ? 0 : 8, x = code[1] & 0x40 ? 0 : 8, b = code[1] & 0x20 ? 0 : 8;
  found.prefix = code[2] & 3;
  found.other = ~(code[2] >> 3) & 15;
  found.opcode = code[3];
  if (found.opcode != 0x49 && found.opcode != 0x4B && found.opcode != 0x5C && found.opcode != 0x5E) return false;
  const int mode = code[4] >> 6;
  found.reg = (code[4] >> 3 & 7) | r;
  found.rm = (code[4] & 7) | b;
  found.in_memory = mode != 3;
  found.length = 5;
  if (!found.in_memory) return true;
  int64_t base = 0;
  found.stride = 0;
  bool has_base = true;
  if ((code[4] & 7) == 4) {
    const uint8_t sib = code[5];
    found.length = 6;
    const int index = (sib >> 3 & 7) | x;
    if (index != 4) found.stride = *register_of(context, index) << (sib >> 6);
    has_base = !((sib & 7) == 5 && mode == 0);
    if (has_base) base = *register_of(context, (sib & 7) | b);
  } else if (mode == 0 && (code[4] & 7) == 5) {  // relative to the next instruction
    base = reinterpret_cast<int64_t>(code) + found.length + 4;
    has_base = false;
  } else {
    base = *register_of(context, found.rm);
  }
  int32_t shift = 0;
  if (mode == 1) {
    shift = static_cast<int8_t>(code[found.length]);
    found.length += 1;
  } else if (mode == 2 || !has_base) {
    memcpy(&shift, code + found.length, 4);
    found.length += 4;
  }
  found.address = reinterpret_cast<uint8_t*>(base + shift);
  return true;
}

float bf16(const uint8_t* from) {
  uint16_t half;
  memcpy(&half, from, 2);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// sums += x @ w: each element of x and w is 4 bytes, of bytes or of bf16.
void multiply(const Instruction& i) {
  const int rows = shapes.rows[i.reg], columns = shapes.row_bytes[i.reg] / 4, depth = shapes.row_bytes[i.rm] / 4;
  if (rows != shapes.rows[i.rm] || columns * 4 != shapes.row_bytes[i.other] || depth != shapes.rows[i.other]) abort();
  const bool signed_x = i.prefix == 2 || i.prefix == 3, signed_w = i.prefix == 1 || i.prefix == 3;
  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < columns; ++n) {
      uint8_t* to = tiles[i.reg][m] + 4 * n;
      if (i.opcode == 0x5C) {
        float parts[2] = {}, sum;
        for (int k = 0; k < depth; ++k)
          for (int j = 0; j < 2; ++j)
            parts[j] += bf16(tiles[i.rm][m] + 4 * k + 2 * j) * bf16(tiles[i.other][k] + 4 * n + 2 * j);
        memcpy(&sum, to, 4);
        sum += parts[0] + parts[1];
        memcpy(to, &sum, 4);
        continue;
      }
      int32_t sum;
      memcpy(&sum, to, 4);
      for (int k = 0; k < depth; ++k)
        for (int j = 0; j < 4; ++j) {
          const uint8_t a = tiles[i.rm][m][4 * k + j], b = tiles[i.other][k][4 * n + j];
          sum += (signed_x ? static_cast<int8_t>(a) : a) * (signed_w ? static_cast<int8_t>(b) : b);
        }
      memcpy(to, &sum, 4);
    }
}

bool run(const Instruction& i) {
  if (i.opcode == 0x5C || i.opcode == 0x5E) {
    if (i.in_memory) return false;
    multiply(i);
  } else if (i.opcode == 0x4B) {  // loads and stores
    if (!i.in_memory || shapes.palette != 1) abort();
    for (int row = 0; row < 16; ++row) {
      uint8_t* at = i.address + row * i.stride;
      const int bytes = shapes.row_bytes[i.reg];
      if (i.prefix == 2) {
        if (row < shapes.rows[i.reg]) memcpy(at, tiles[i.reg][row], bytes);
      } else {
        memset(tiles[i.reg][row], 0, 64);
        if (row < shapes.rows[i.reg]) memcpy(tiles[i.reg][row], at, bytes);
      }
    }
  } else if (!i.in_memory) {  // tilezero, tilerelease
    if (i.prefix == 3) memset(tiles[i.reg], 0, sizeof tiles[0]);
    if (i.prefix == 0) shapes = Shapes{};
  } else if (i.prefix == 1) {  // sttilecfg
    memcpy(i.address, &shapes, 64);
  } else {
    memcpy(&shapes, i.address, 64);
    memset(tiles, 0, sizeof tiles);
  }
  return true;
}

void handle(int signal, siginfo_t* info, void* given) {
  ucontext_t* context = static_cast<ucontext_t*>(given);
  Instruction instruction{};
  if (!decode(context, instruction) || !run(instruction)) {
    sigaction(SIGILL, &before, nullptr);  // and raise it again
    return;
  }
  __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
  context->uc_mcontext.gregs[REG_RIP] += instruction.length;
}

}  // namespace

extern "C" long count() { return calls; }  // instructions so far

__attribute__((constructor)) static void install() {
  struct sigaction action{};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGILL, &action, &before);
}
