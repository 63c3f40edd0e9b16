// What every body stands on: element types, rounding, sums in one fixed order. Compute is in float32 (double and whole
// numbers as they are); half types are widened where they are read and rounded once where they are written.
typedef long long i64;
typedef unsigned int u32;
#define BODY static __device__ __forceinline__ void body(SIGNATURE)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
#define INFINITE __int_as_float(0x7f800000)
#define LARGEST 3.402823466e38f

// A kernel may be started while the one before it still runs; what that one and those before it wrote is there when
// `inputs_ready` returns. Every thread of every kernel calls it before it reads or writes what others do.
__device__ void next_may_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ void inputs_ready() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct half_t {
  unsigned short bits;
  __device__ operator float() const { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits)); return f; }
  half_t() = default;
  __device__ half_t(float f) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f)); }
};
struct bfloat16_t {
  unsigned short bits;
  __device__ operator float() const { return __uint_as_float((u32)bits << 16); }
  bfloat16_t() = default;
  __device__ bfloat16_t(float f) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f)); }
};

template <int N> struct Numbers {
  i64 at[N ? N : 1];
  __device__ i64 operator[](int i) const { return at[i]; }
};

template <class T> struct Wide { typedef T type; };
template <> struct Wide<half_t> { typedef float type; };
template <> struct Wide<bfloat16_t> { typedef float type; };
#define WIDE(T) typename Wide<T>::type
template <class T> struct IsFloat { static const bool value = false; };
template <> struct IsFloat<float> { static const bool value = true; };
template <> struct IsFloat<double> { static const bool value = true; };
template <class T> struct Sum { typedef i64 type; };  // what numbers of a type are summed in
template <> struct Sum<float> { typedef float type; };
template <> struct Sum<double> { typedef double type; };
template <> struct Sum<unsigned long long> { typedef unsigned long long type; };

template <class T> __device__ bool finite(T v) { return true; }
template <> __device__ bool finite(float v) { return fabsf(v) <= LARGEST; }
template <class T> __device__ bool is_nan(T v) { return v != v; }

// A value in the type that it is stored in. Floats go to whole numbers towards zero, to bool as "not zero".
template <class T, class V> __device__ T stored(V v) { return (T)v; }

__device__ i64 element() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

// Where element i of `shape` stands in an operand with these steps; a step of 0 repeats it.
template <int R> __device__ i64 offset(i64 i, const Numbers<R>& shape, const Numbers<R>& steps, i64 start) {
#pragma unroll
  for (int d = R - 1; d >= 0; --d) { start += i % shape[d] * steps[d]; i /= shape[d]; }
  return start;
}

template <class T> __device__ T warp_sum(T v) {
  for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(0xffffffffu, v, m);
  return v;
}
template <class T> __device__ T warp_max(T v) {
  for (int m = 16; m; m >>= 1) { T o = __shfl_xor_sync(0xffffffffu, v, m); v = o > v ? o : v; }
  return v;
}
// Every thread gets the sum; partial sums of the warps are added from the first to the last.
__device__ float block_sum(float v) {
  __shared__ float parts[32];
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  float total = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) total += parts[w];
  return total;
}
__device__ float block_max(float v) {
  __shared__ float parts[32];
  v = warp_max(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  for (int w = 0; w < blockDim.x / 32; ++w) v = fmaxf(v, parts[w]);
  return v;
}

// An index beyond the elements: which step, which index, how many elements. The first to come is kept.
__device__ void report(i64* fault, int step, i64 index, i64 extent) {
  if (atomicCAS((unsigned long long*)fault, 0ull, (unsigned long long)step)) return;
  fault[1] = index;
  fault[2] = extent;
}

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
__device__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
__device__ double softplus(double x) { return fmax(x, 0.0) + log1p(exp(-fabs(x))); }
__device__ float gelu(float x) { return (float)(0.5 * x * (1.0 + erf(x / 1.4142135623730951))); }
__device__ double gelu(double x) { return 0.5 * x * (1.0 + erf(x / 1.4142135623730951)); }
template <class T> __device__ T gelu_tanh(T x) {
  T inner = (T)0.7978845608028654 * (x + (T)0.044715 * x * x * x);
  return (T)0.5 * x * ((T)1 + tanh(inner));
}

// Element i of a row of codes of 4 or 8 bits, the low half first.
__device__ int code(const unsigned char* codes, i64 i, int bits) {
  return bits == 8 ? codes[i] : codes[i >> 1] >> (4 * (i & 1)) & 15;
}
