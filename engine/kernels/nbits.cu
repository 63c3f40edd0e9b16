// Rows of x (the grid's second dimension) times weights of 4- or 8-bit codes, each in an order that K alone decides.
#ifndef MIXTURE
#define ROW_K P_K
#define X_ROW (x + (i64)blockIdx.y * P_K)
typedef y_t out_t;
#endif
#define BLOCKS ((ROW_K + P_block - 1) / P_block)

#if !defined HAS_zero_points
typedef unsigned char points_t;
#else
typedef zero_points_t points_t;
#endif
#ifdef POINTS_PACKED
#define POINTS_A_ROW ((BLOCKS * P_bits + 7) / 8)
#else
#define POINTS_A_ROW BLOCKS
#endif
// What is loaded for the zero point of a row's block `b`, and its value: apart, so that nobody waits for it before it is used.
__device__ points_t stored_point(const points_t* row, int b) {
#if !defined HAS_zero_points
  return 0;
#elif defined POINTS_PACKED
  return row[b * P_bits / 8];
#else
  return row[b];
#endif
}
__device__ float point_value(points_t stored, int b) {
#if !defined HAS_zero_points
  return (float)(1 << (P_bits - 1));
#elif defined POINTS_PACKED
  return (float)code(&stored, b * P_bits / 4 % 2, P_bits);
#else
  return (float)stored;
#endif
}

#ifdef TILES
// Tensor cores, 16 outputs by 128 columns a turn. A unit is 32 codes of a row, 16 bytes; lane 4g + t holds unit t of rows
// g and g + 8. Masked codes are fp16 subnormals as they stand, and those of odd places 16 times as large. An element of x,
// scaled by a power of two that its unit shares, is the sum of two fp16 numbers, 22 bits; columns 2t and 2t + 1 of the
// other factor hold both parts for unit t and zeros for the other units, so that sums of a unit come out apart, in float32,
// and are scaled there.
#define UNITS (BLOCKS * (P_block / 32))
#define TURNS ((P_K + 127) / 128)  // codes beyond K meet zeros
#define EVEN 0x000f000fu
#define ODD 0x00f000f0u
#define SPLIT 2048.0f         // between both parts of x
#define SUBNORMAL 5.9604644775390625e-8f  // what a code of 1 is

__device__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ uint4 streamed(const unsigned char* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
__device__ u32 halves(float low, float high) {
  u32 made;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(made) : "f"(high), "f"(low));
  return made;
}
__device__ float half_of(u32 pair, int which) {
  half_t h;
  h.bits = (unsigned short)(which ? pair >> 16 : pair);
  return (float)h;
}
// x as the tensor cores take it, of one turn.
struct Fragment {
  uint4 words[4];     // of lanes that stand for a unit; zeros elsewhere
  float factor, sum;  // of the lane's unit: what scales it back, and the sum of its scaled elements
};
// The same as it lies in shared memory, where a warp puts it for itself.
struct Room {
  uint4 words[4][8];
  float2 units[4];
  // Lanes L and L + 16 bring elements 8L to 8L + 7, each half of a warp to a room of its own, or to none.
  static __device__ void put(Room* room, float (&v)[8]) {
    const int lane = threadIdx.x % 32, unit = lane / 4 % 4;
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) top = max(top, __float_as_uint(v[i]) & 0x7fffffffu);
    float part = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    for (int m = 1; m < 4; m <<= 1) {
      top = max(top, __shfl_xor_sync(0xffffffffu, top, m));
      part += __shfl_xor_sync(0xffffffffu, part, m);
    }
    if (!room) return;
    top >>= 23;
    const u32 e = top == 255 ? 141 : top < 15 ? 15 : top;  // what is not finite is left to show; at least 2^-112
    const float up = __uint_as_float((268 - e) << 23);     // the largest element gets 2^14 to 2^15
    if (lane % 4 == 0) room->units[unit] = make_float2(__uint_as_float((e - 14) << 23), part * up * SUBNORMAL);
    u32 large[4], small[4];  // pairs 0 4, 2 6, 1 5 and 3 7
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = i % 2 * 2 + i / 2;
      const float low = v[at] * up, high = v[at + 4] * up;
      large[i] = halves(low, high);
      small[i] = halves((low - half_of(large[i], 0)) * SPLIT, (high - half_of(large[i], 1)) * SPLIT);
    }
    uint4* to = &room->words[lane % 4][2 * unit];
    to[0] = make_uint4(large[0], large[1], large[2], large[3]);
    to[1] = make_uint4(small[0], small[1], small[2], small[3]);
  }
  __device__ void get(Fragment& x) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) x.words[j] = g / 2 == t ? words[j][g] : make_uint4(0, 0, 0, 0);
    x.factor = units[t].x;
    x.sum = units[t].y;
  }
};

// A group is the rows that a block takes at a time, tile by tile; a gated pair has eight of each in a tile. The last group
// of a weight ends with its last row, and what it makes twice is twice the same.
#ifndef P_gated
#define P_gated 0
#endif
#ifndef ROW_STEP
#define ROW_STEP 1  // from one row of a tile's half to the next
#endif
#define TILE_ROWS (P_gated ? 8 : 16)
#define GROUP_ROWS (TILE_ROWS * TILES)
#define GROUPS_OF(rows) (((rows) + GROUP_ROWS - 1) / GROUP_ROWS)
#if P_gated || !defined P_N2
#define GROUPS GROUPS_OF(P_N)
#elif !defined P_N3
#define GROUPS (GROUPS_OF(P_N) + GROUPS_OF(P_N2))
#else
#define GROUPS (GROUPS_OF(P_N) + GROUPS_OF(P_N2) + GROUPS_OF(P_N3))
#endif
#define ROW_BYTES (UNITS * 16)
#ifdef HAS_zero_points
#define POINTS(n) zero_points##n
#else
#define POINTS(n) (const points_t*)0
#endif
#ifdef HAS_bias
#define BIAS(n, row) (float)bias##n[row]
#else
#define BIAS(n, row) 0.0f
#endif
#ifdef HAS_residual
#define RESIDUAL(row) (float)residual[(i64)blockIdx.y * P_N + (row)]
#else
#define RESIDUAL(row) 0.0f
#endif
__device__ int first_row(int group, int rows) { return max(0, min(group * GROUP_ROWS, rows - GROUP_ROWS)); }

// A lane's row of codes in the first tile of a group.
struct Line {
  const unsigned char* codes;
  const scales_t* scales;
  const points_t* points;
  __device__ Line() {}
  __device__ Line(const unsigned char* c, const scales_t* s, const points_t* z, int row) {
    codes = c + (i64)row * ROW_BYTES;
    scales = s + (i64)row * BLOCKS;
    points = z + (i64)row * POINTS_A_ROW;
  }
};
#ifdef HAS_zero_points
#define MIXTURE_POINTS SIDE(_zero_points)
#else
#define MIXTURE_POINTS (const points_t*)0
#endif
#define ROW_OF(group, rows, at) min(first_row(group, rows) + (at), (rows) - 1)
#define LINE(n, rows, group, at) Line(codes##n, scales##n, POINTS(n), ROW_OF(group, rows, at))
__device__ Line line_of(int group, int half, int g, SIGNATURE) {
#if defined UP
  const int at = P_gated ? g : 8 * half + g;
  return Line(fc1, fc1_scales, MIXTURE_POINTS, row_of_pair(ROW_OF(group, P_N, at), half));
#elif defined DOWN
  return Line(fc2, fc2_scales, MIXTURE_POINTS, ROW_OF(group, P_N, 8 * half + g));
#elif P_gated
  return half ? LINE(2, P_N, group, g) : LINE(, P_N, group, g);
#else
  const int at = 8 * half + g;
#ifdef P_N3
  if (group >= GROUPS_OF(P_N) + GROUPS_OF(P_N2)) return LINE(3, P_N3, group - GROUPS_OF(P_N) - GROUPS_OF(P_N2), at);
#endif
#ifdef P_N2
  if (group >= GROUPS_OF(P_N)) return LINE(2, P_N2, group - GROUPS_OF(P_N), at);
#endif
  return LINE(, P_N, group, at);
#endif
}

// Where the row of a group at `slot` goes, null beyond the rows of its weight, and what is added to it.
struct Output {
  out_t* to;
  float extra, of_value;
};
#define OUTPUT(n, rows, group, more)                                                \
  const int row = first_row(group, rows) + slot;                                    \
  if (row >= (rows)) return {0, 0, 0};                                              \
  return {y##n + (i64)blockIdx.y * (rows) + row, more, 0};
__device__ Output output_of(int group, int slot, SIGNATURE) {
#if defined UP
  const int row = first_row(group, P_N) + slot;
  if (row >= P_N) return {0, 0, 0};
  return {hidden + (i64)blockIdx.y * PADDED + row, UP_BIAS(row, 0), P_gated ? UP_BIAS(row, 1) : 0};
#elif defined DOWN
  OUTPUT(, P_N, group, added(row, PASSED))
#else
#if !P_gated && defined P_N3
  if (group >= GROUPS_OF(P_N) + GROUPS_OF(P_N2)) {
    OUTPUT(3, P_N3, group - GROUPS_OF(P_N) - GROUPS_OF(P_N2), BIAS(3, row))
  }
#endif
#if !P_gated && defined P_N2
  if (group >= GROUPS_OF(P_N)) { OUTPUT(2, P_N2, group - GROUPS_OF(P_N), BIAS(2, row)) }
#endif
  OUTPUT(, P_N, group, BIAS(, row) + RESIDUAL(row))
#endif
}

#ifndef FROM
#define FROM(line, n) line  // where a mixture's experts lie apart, another line for each
#endif
// Codes of a lane's unit in one turn and one tile.
struct Held {
  uint4 codes[2];
  scales_t scales[2];
  points_t points[2];
  __device__ void load(const Line (&lines)[2], int turn, int tile) {
#ifdef DOWN
    const int own = turn % TURNS_EACH, n = turn / TURNS_EACH;
    const i64 row = tile * TILE_ROWS + ROWS_BEFORE(n);
#else
    const int own = turn, row = tile * TILE_ROWS * ROW_STEP;
#endif
    const int unit = own * 4 + threadIdx.x % 4, block = unit / (P_block / 32);
    const bool there = UNITS % 4 == 0 || unit < UNITS;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      codes[half] = there ? streamed(FROM(lines[half].codes, n) + row * ROW_BYTES + unit * 16) : make_uint4(0, 0, 0, 0);
      scales[half] = there ? FROM(lines[half].scales, n)[row * BLOCKS + block] : scales_t{};
      points[half] = there ? stored_point(FROM(lines[half].points, n) + row * POINTS_A_ROW, block) : points_t{};
    }
  }
  __device__ void add(const Fragment& x, int turn, float (&sums)[2]) const {
    const int block = (turn * 4 + threadIdx.x % 4) / (P_block / 32);
    float even[4] = {}, odd[4] = {};
    const u32 low[4] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w};
    const u32 high[4] = {codes[1].x, codes[1].y, codes[1].z, codes[1].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 p = low[j], q = high[j], p8 = p >> 8, q8 = q >> 8;
      multiply(even, p & EVEN, q & EVEN, p8 & EVEN, q8 & EVEN, x.words[j].x, x.words[j].y);
      multiply(odd, p & ODD, q & ODD, p8 & ODD, q8 & ODD, x.words[j].z, x.words[j].w);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 2 * half;
      const float large = fmaf(odd[i], 0.0625f, even[i]), small = fmaf(odd[i + 1], 0.0625f, even[i + 1]);
      const float made = fmaf(small, 1.0f / SPLIT, large) - point_value(points[half], block) * x.sum;
      sums[half] = fmaf(made, (float)scales[half] * x.factor, sums[half]);
    }
  }
};

// Elements k to k + 7 of a row; beyond its end, zeros.
template <class T> __device__ void eight(const T* row, int k, float (&v)[8]) {
#ifdef BY_EIGHT
  T own[8] = {};
  if (k < P_K)
#pragma unroll
    for (int i = 0; i < (int)sizeof(T) / 2; ++i) ((uint4*)own)[i] = ((const uint4*)(row + k))[i];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = (float)own[i];
#else
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = k + i < P_K ? (float)row[k + i] : 0;
#endif
}

// Warps share the turns; a block goes from group to group, asking for the next codes as soon as it has used some.
BODY {
  constexpr int WARPS = THREADS / 32, SLOTS = TILES * 16, EACH = (TURNS + WARPS - 1) / WARPS, PAIRS = (EACH + 1) / 2,
                AT_ONCE = PAIRS < 4 ? PAIRS : 4;
  extern __shared__ uint4 shared[];
  __shared__ float parts[2][WARPS][SLOTS], squares[WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, slot = threadIdx.x;
  Room* rooms = (Room*)shared + warp * EACH;
  int group = blockIdx.x;
  Line lines[2];
  Held held[DEPTH][TILES];
  const auto ask = [&] {
    lines[0] = line_of(group, 0, g, PASSED);
    lines[1] = line_of(group, 1, g, PASSED);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d)
#pragma unroll
      for (int r = 0; r < TILES; ++r)
        if (warp + d * WARPS < TURNS) held[d][r].load(lines, warp + d * WARPS, r);
  };
#if defined UP  // which weights, the logits say
  float logits[LOGITS_A_LANE] = {};
#elif defined DOWN
  inputs_ready();
  recall(PASSED);
  ask();
#else
  ask();
#endif
  // Two turns at a time, a half of the warp each.
  const auto column = [&](int pair) { return (warp + (2 * pair + lane / 16) * WARPS) * 128 + lane % 16 * 8; };
#ifdef HAS_gamma
#ifdef APART
  inputs_ready();  // a kernel before puts the factors there
#endif
  float by[AT_ONCE][8];
#pragma unroll
  for (int j = 0; j < AT_ONCE; ++j) eight(gamma, column(j), by[j]);
#endif
  inputs_ready();
#ifdef UP
  if (warp == 0) load_logits(router + (i64)(blockIdx.y / P_k) * EXPERTS, logits);
#endif
  const auto* row = X_ROW;
  float square = 0;
#pragma unroll 1
  for (int start = 0; start < PAIRS; start += AT_ONCE) {
    float v[AT_ONCE][8];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) eight(row, column(start + j), v[j]);
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
#ifdef HAS_gamma
      if (start) eight(gamma, column(start + j), by[j]);
#pragma unroll
      for (int i = 0; i < 8; ++i) square += v[j][i] * v[j][i], v[j][i] *= by[j][i];
#endif
      const int turn = 2 * (start + j) + lane / 16;
      Room::put(turn < EACH ? &rooms[turn] : 0, v[j]);
    }
  }
#ifdef HAS_gamma
  square = warp_sum(square);
  if (lane == 0) squares[warp] = square;
#endif
#ifdef UP
  if (warp == 0) pick(logits, PASSED);
  __syncthreads();
  ask();
  settle(logits, PASSED);
#endif
  __syncwarp();
  for (int round = 0; group < GROUPS; ++round) {
    const int next = group + gridDim.x;
    const bool more = next < GROUPS;
    const Output out = slot < SLOTS ? output_of(group, slot, PASSED) : Output{0, 0, 0};
    float sums[TILES][2] = {};
    const Line after[2] = {line_of(more ? next : group, 0, g, PASSED), line_of(more ? next : group, 1, g, PASSED)};
#pragma unroll 1
    for (int start = 0; start < EACH; start += DEPTH)
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        const int j = start + d, then = j + DEPTH;
        if (warp + j * WARPS < TURNS) {
          Fragment own;
          rooms[j].get(own);
#pragma unroll
          for (int r = 0; r < TILES; ++r) held[d][r].add(own, warp + j * WARPS, sums[r]);
        }
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
          if (then < EACH) {
            if (warp + then * WARPS < TURNS) held[d][r].load(lines, warp + then * WARPS, r);
          } else if (more && warp + (then - EACH) * WARPS < TURNS) {
            held[d][r].load(after, warp + (then - EACH) * WARPS, r);
          }
        }
      }
    float(&part)[WARPS][SLOTS] = parts[round % 2];
#pragma unroll
    for (int r = 0; r < TILES; ++r)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v = sums[r][half];
        v += __shfl_xor_sync(0xffffffffu, v, 1);
        v += __shfl_xor_sync(0xffffffffu, v, 2);
        if (t == 0) part[warp][r * 16 + half * 8 + g] = v;
      }
    __syncthreads();
    lines[0] = after[0];
    lines[1] = after[1];
    group = next;
    if (slot >= (P_gated ? SLOTS / 2 : SLOTS)) continue;
    float scale = 1.0f / SUBNORMAL;
#ifdef HAS_gamma
    float mean = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) mean += squares[w];
    mean /= P_K;
    // Squares that overflow would give zeros, and zeros give logits that look like numbers: let it show.
    scale *= finite(mean) ? 1.0f / sqrtf(mean + P_eps) : NOT_A_NUMBER;
#endif
    const auto total = [&](int of) {
      float made = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) made += part[w][of];
      return made * scale;
    };
#if P_gated
    const float gate = total(slot / 8 * 16 + slot % 8), value = total(slot / 8 * 16 + slot % 8 + 8);
#ifdef UP
    if (out.to) *out.to = shares[blockIdx.y % P_k] * activated(gate + out.extra, value + out.of_value);
#else
    if (out.to) *out.to = gate * sigmoid(gate) * value;
#endif
#elif defined UP
    if (out.to) *out.to = shares[blockIdx.y % P_k] * activated(total(slot) + out.extra, 0);
#else
    const float made = total(slot);
    if (out.to) *out.to = made + out.extra;
#endif
  }
}
#else
// A warp an output; lane L takes words L, L + 32, ... of the codes, each within one block.
#define CODES_A_WORD (32 / P_bits)
#define WORDS_A_BLOCK (P_block / CODES_A_WORD)

// A code as a float without a conversion, which is slow: it is the low end of 2^23's mantissa.
__device__ float code_value(u32 word, int j) {
  return __uint_as_float(0x4b000000u | (word >> (j * P_bits) & ((1u << P_bits) - 1))) - 8388608.0f;
}
BODY {
  inputs_ready();
  const int lane = threadIdx.x % 32;
  const i64 n = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (n >= P_N) return;
  const x_t* row = x + (i64)blockIdx.y * P_K;
  const u32* words = (const u32*)codes + n * (BLOCKS * WORDS_A_BLOCK);
#ifdef HAS_zero_points
  const points_t* points = zero_points + n * POINTS_A_ROW;
#else
  const points_t* points = 0;
#endif
  float sum = 0;
#pragma unroll 4
  for (int w = lane; w < BLOCKS * WORDS_A_BLOCK; w += 32) {
    const u32 word = words[w];
    const int b = w / WORDS_A_BLOCK, k = w * CODES_A_WORD;
    const float zero = point_value(stored_point(points, b), b), scale = (float)scales[n * BLOCKS + b];
    float part = 0;
#pragma unroll
    for (int j = 0; j < CODES_A_WORD; ++j)
      if (k + j < P_K) part += (code_value(word, j) - zero) * (float)row[k + j];
    sum += part * scale;
  }
  sum = warp_sum(sum);
#ifdef HAS_bias
  sum += (float)bias[n];
#endif
  if (lane == 0) y[(i64)blockIdx.y * P_N + n] = sum;
}
#endif
