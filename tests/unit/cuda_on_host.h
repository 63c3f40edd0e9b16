// What a kernel's text asks of a card, on a host: a block's threads run in turns, from one wait for others to the next, its
// warps and the blocks in an order that is drawn. Stands in the place of support.cu.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define BODY static __device__ __forceinline__ void body(SIGNATURE)
#define NOT_A_NUMBER NAN
#define INFINITE INFINITY
#define LARGEST 3.402823466e38f
typedef long long i64;
typedef unsigned int u32;

struct Dim { int x, y, z; };
static Dim threadIdx, blockIdx, gridDim, blockDim;
struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct half_t {
  _Float16 held;
  half_t() = default;
  half_t(float f) : held((_Float16)f) {}
  operator float() const { return held; }
};
template <int N> struct Numbers {
  i64 at[N ? N : 1];
  i64 operator[](int i) const { return at[i]; }
};
static bool finite_number(float v) { return fabsf(v) <= LARGEST; }
#define finite finite_number

static void next_may_start() {}
static void inputs_ready() {}
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return sqrtf(a); }
static float __frcp_rn(float a) { return 1.0f / a; }
template <class T> static T __ldcg(const T* from) { return *from; }
static void __threadfence() {}
static u32 atomicAdd(u32* to, u32 more) { const u32 before = *to; *to += more; return before; }

static const int STACK = 64 << 10, WARP = 32, MOST_WARPS = 32;
struct Thread {
  ucontext_t start;
  jmp_buf here;
  std::unique_ptr<char[]> stack{new char[STACK]};
  bool begun, done, odd;
};
static std::vector<Thread> threads;
static std::function<void()> work;
static jmp_buf rounds;
static int progress, running, block_threads, arrived, passed, warp_arrived[MOST_WARPS], warp_passed[MOST_WARPS];
static float told[2][MOST_WARPS][WARP];

static void give_way() {
  if (!_setjmp(threads[running].here)) _longjmp(rounds, 1);
}
static void wait_for(int& here, int& gone, int all) {
  const int before = gone;
  if (++here == all) { here = 0; ++gone; ++progress; }
  else while (gone == before) give_way();
}
static void __syncthreads() { wait_for(arrived, passed, block_threads); }
static float told_by(float own, int lane) {
  const int me = running, warp = me / WARP;
  const bool odd = threads[me].odd = !threads[me].odd;  // what was told last may still be read
  told[odd][warp][me % WARP] = own;
  wait_for(warp_arrived[warp], warp_passed[warp], WARP);
  return told[odd][warp][lane];
}
static float __shfl_xor_sync(u32, float own, int mask) { return told_by(own, running % WARP ^ mask); }
static float __shfl_sync(u32, float own, int lane, int width) {
  return told_by(own, running % WARP / width * width + lane);
}

static void run_thread() {
  work();
  threads[running].done = true;
  ++progress;
  _longjmp(rounds, 1);
}
static void take_turn(int one) {
  Thread& thread = threads[running = one];
  threadIdx = {one, 0, 0};
  if (_setjmp(rounds)) return;
  if (thread.begun) _longjmp(thread.here, 1);
  thread.begun = true;
  getcontext(&thread.start);
  thread.start.uc_stack.ss_sp = thread.stack.get();
  thread.start.uc_stack.ss_size = STACK;
  makecontext(&thread.start, run_thread, 0);
  setcontext(&thread.start);
}
// Each warp goes as far as it can before the next one begins, so that a wait that is left out shows.
static void run_block(std::mt19937& random) {
  memset(warp_arrived, 0, sizeof warp_arrived);
  arrived = 0;
  for (Thread& thread : threads) thread.begun = thread.done = false;
  std::vector<int> warps(threads.size() / WARP);
  std::iota(warps.begin(), warps.end(), 0);
  for (bool any = true; any;) {
    any = false;
    std::shuffle(warps.begin(), warps.end(), random);
    for (const int warp : warps) {
      for (int before = -1; before != progress;) {
        before = progress;
        for (int lane = 0; lane < WARP; ++lane)
          if (const int one = warp * WARP + lane; !threads[one].done) { any = true; take_turn(one); }
      }
    }
  }
}
static void run_grid(int x, int y, int each, int seed, std::function<void()> kernel) {
  gridDim = {x, y, 1}, blockDim = {each, 1, 1}, block_threads = each, work = kernel;
  threads.resize(each);
  std::mt19937 random(seed);
  std::vector<int> order(x * y);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const int block : order) {
    blockIdx = {block % x, block / x, 0};
    run_block(random);
  }
}
