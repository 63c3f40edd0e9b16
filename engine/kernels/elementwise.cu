// y = EXPRESSION of A, B and C, which are elements of a, b and c, broadcast by steps. Also every plain move of elements.
#define PLUS(a, b) ((a) + (b))

template <class T> __device__ T whole_power(T a, T b) {
  if (b < 0) return a == 1 ? 1 : a == (T)-1 ? (b % 2 ? (T)-1 : 1) : 0;
  T made = 1;
  for (; b; b >>= 1, a *= a) if (b & 1) made *= a;
  return made;
}
template <class T, class E> __device__ T power(T a, E b) { return whole_power<i64>((i64)a, (i64)b); }
template <class E> __device__ float power(float a, E b) { return powf(a, (float)b); }
template <class E> __device__ double power(double a, E b) { return pow(a, (double)b); }

// NumPy's: a number that is none wins.
template <class T> __device__ T smaller(T a, T b) { return is_nan(a) || a < b ? a : b; }
template <class T> __device__ T larger(T a, T b) { return is_nan(a) || a > b ? a : b; }
template <class T> __device__ T sign(T a) { return is_nan(a) ? a : (T)((a > (T)0) - (a < (T)0)); }
template <class T> __device__ T absolute(T a) { return a < (T)0 ? (T)-a : a; }
template <> __device__ float absolute(float a) { return fabsf(a); }
template <> __device__ double absolute(double a) { return fabs(a); }

BODY {
  const i64 i = element();
  if (i >= count) return;
#ifdef HAS_a
  const WIDE(a_t) A = a[offset(i, shape, a_steps, a_start)];
#endif
#ifdef HAS_b
  const WIDE(b_t) B = b[offset(i, shape, b_steps, b_start)];
#endif
#ifdef HAS_c
  const WIDE(c_t) C = c[offset(i, shape, c_steps, c_start)];
#endif
  y[i] = stored<y_t>(EXPRESSION);
}
