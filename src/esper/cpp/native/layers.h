// Normalizations, activation functions, pooling and resizing, forward and backward, on rows of lanes (lanes.h).
//
// Gradients of weights are added to what other instructions gave. A weight that is a null pointer is 1, a bias 0.

#pragma once

#include "lanes.h"

#include <algorithm>
#include <vector>

// X(name, operands): see program.cpp.
#define ESPER_LAYERS(X)                                                                                                \
    X(BATCH_NORM, "xxxxxXXxx") X(BATCH_NORM_BACKWARD, "xxxxxXxxxxx") X(BATCH_NORM_FIXED, "xxxxxxx")                    \
    X(BATCH_NORM_FIXED_BACKWARD, "xxxxxxxxxx") X(GROUP_NORM, "xxxxxxx") X(GROUP_NORM_BACKWARD, "xxxxxxxxxxx")          \
    X(ACTIVATE, "xx") X(ACTIVATE_BACKWARD, "xx") X(PRELU, "xxx") X(PRELU_BACKWARD, "xxxx") X(SOFTMAX, "xx")            \
    X(SOFTMAX_BACKWARD, "xx") X(REDUCE, "xx") X(REDUCE_BACKWARD, "xxxx") X(MAX_POOL, "xxx")                            \
    X(MAX_POOL_BACKWARD, "xxx") X(AVERAGE_POOL, "xx") X(AVERAGE_POOL_BACKWARD, "xx") X(RESIZE, "xx")                   \
    X(RESIZE_BACKWARD, "xx")

namespace esper {

// -- functions of floats: no calls, no branches, accurate to a few units in the last place ---------------------------

// Polynomial of Cephes.
inline float log_of(float x) {
    const bool tiny = x < std::numeric_limits<float>::min();
    const int32_t bits = bits_of<int32_t>(tiny ? x * 8388608.0f : x);
    const int32_t exponent = (bits - 0x3f3504f3) >> 23;  // so that the rest is in [sqrt(1/2), sqrt(2))
    const float e = float(exponent) - (tiny ? 23.0f : 0.0f);
    const float r = bits_of<float>(bits - exponent * 0x800000) - 1.0f, square = r * r;
    float p = 7.0376836292e-2f;
    p = p * r - 1.1514610310e-1f;
    p = p * r + 1.1676998740e-1f;
    p = p * r - 1.2420140846e-1f;
    p = p * r + 1.4249322787e-1f;
    p = p * r - 1.6668057665e-1f;
    p = p * r + 2.0000714765e-1f;
    p = p * r - 2.4999993993e-1f;
    p = p * r + 3.3333331174e-1f;
    float value = p * r * square - 2.12194440e-4f * e - 0.5f * square;
    value = r + value + 0.693359375f * e;
    value = x > 0.0f ? value : std::numeric_limits<float>::quiet_NaN();
    value = x == 0.0f ? -std::numeric_limits<float>::infinity() : value;
    return x == std::numeric_limits<float>::infinity() ? x : value;
}

// What rounding took from 1 + x is given back.
inline float log1p_of(float x) {
    const float w = 1.0f + x, value = log_of(w) - ((w - 1.0f) - x) / w;
    return w == std::numeric_limits<float>::infinity() || w == 0.0f ? log_of(w) : value;
}

// As exp_of; 2^n - 1 is added to the small part, so that nothing cancels.
inline float expm1_of(float x) {
    const float highest = 88.0f, lowest = -20.0f, shift = 12582912.0f;
    float bounded = x > highest ? highest : x;
    bounded = bounded < lowest ? lowest : bounded;
    const float shifted = bounded * 1.44269504088896341f + shift, n = shifted - shift;
    const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r;
    const float power = bits_of<float>((bits_of<uint32_t>(shifted) << 23) + (127u << 23));
    const float value = p * power + (power - 1.0f);
    return x > highest ? exp_of(x) : value;
}

// Eigen's rational approximation; beyond the limit it is 1 to the last bit.
inline float erf_of(float x) {
    const float limit = 4.0f;
    x = x > limit ? limit : x;
    x = x < -limit ? -limit : x;
    const float square = x * x;
    float p = -2.72614225801306e-10f;
    p = p * square + 2.77068142495902e-08f;
    p = p * square - 2.10102402082508e-06f;
    p = p * square - 5.69250639462346e-05f;
    p = p * square - 7.34990630326855e-04f;
    p = p * square - 2.95459980854025e-03f;
    p = p * square - 1.60960333262415e-02f;
    float q = -1.45660718464996e-05f;
    q = q * square - 2.13374055278905e-04f;
    q = q * square - 1.68282697438203e-03f;
    q = q * square - 7.37332916720468e-03f;
    q = q * square - 1.42647390514189e-02f;
    return p * x / q;
}

// sin(x + quarters pi / 2). Multiples of pi / 2 are taken away in double precision, which has digits enough for x up to
// 1e10; that of larger ones is a number between -1 and 1.
inline float sine_of(float x, int64_t quarters) {
    const double shift = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number
    const double shifted = double(x) * 0.63661977236758134308 + shift, n = shifted - shift;
    float r = float((double(x) - n * 1.57079632679489661923) - n * 6.123233995736766e-17);
    r = r > 0.8f ? 0.8f : r;
    r = r < -0.8f ? -0.8f : r;
    const float square = r * r;
    const int64_t quadrant = bits_of<int64_t>(shifted) + quarters;
    const float sine = ((-1.9515295891e-4f * square + 8.3321608736e-3f) * square - 1.6666654611e-1f) * square * r + r;
    const float cosine = ((2.443315711809948e-5f * square - 1.388731625493765e-3f) * square + 4.166664568298827e-2f) *
                             square * square - 0.5f * square + 1.0f;
    const float value = quadrant & 1 ? cosine : sine;
    return quadrant & 2 ? -value : value;
}

inline double log_of(double x) { return std::log(x); }
inline double log1p_of(double x) { return std::log1p(x); }
inline double expm1_of(double x) { return std::expm1(x); }
inline double erf_of(double x) { return std::erf(x); }
inline double sine_of(double x, int64_t quarters) { return quarters ? std::cos(x) : std::sin(x); }

// x^exponent. `sign`: 1 for an even exponent, -1 for an odd one, and NaN if a negative x has no such power.
inline float power_of(float x, float exponent, float sign) {
    const float value = exp_of(exponent * log_of(std::fabs(x)));
    return x < 0.0f ? value * sign : value;
}

inline double power_of(double x, double exponent, double) { return std::pow(x, exponent); }

// log(1 + exp(x)), without overflow.
template <class T> inline T softplus_of(T x) {
    const T e = exp_of(-std::fabs(x)), w = T(1) + e, value = log_of(w) - ((w - T(1)) - e) / w;
    return (x > T(0) ? x : T(0)) + value;
}

// -- activation functions ---------------------------------------------------------------------------------------------

// X(name, f(x), f' g), with the numbers a, b and c. `s` is what the backward pass keeps: x, or f(x) where layers.py
// says so. The first five can be part of a normalization. Comparisons are those of PyTorch, also at corners and NaN.
#define ESPER_FUNCTIONS(X)                                                                                             \
    X(IDENTITY, x, g)                                                                                                  \
    X(RELU, x <= T(0) ? T(0) : x, s <= T(0) ? T(0) : g)                                                                \
    X(HARDTANH, x < a ? a : x > b ? b : x, (s <= a) | (s >= b) ? T(0) : g)                                             \
    X(SILU, x * sigmoid_of(x), g * silu_slope(s))                                                                      \
    X(HARDSWISH, x * clip(x + T(3), T(6)) / T(6), s <= T(-3) ? T(0) : s < T(3) ? g * (s / T(3) + T(0.5)) : g)          \
    X(LEAKY_RELU, x > T(0) ? x : x * a, s > T(0) ? g : g * a)                                                          \
    X(ELU, x > T(0) ? x * b : expm1_of(x * c) * a, s <= T(0) ? g * a * c * exp_of(s * c) : g * b)                      \
    X(GELU, T(0.5) * x * (T(1) + erf_of(x * T(M_SQRT1_2))),                                                            \
      g * (T(0.5) * (T(1) + erf_of(s * T(M_SQRT1_2))) + s * exp_of(T(-0.5) * s * s) * T(0.39894228040143267794)))      \
    X(GELU_TANH, x * gelu_gate(x), g * gelu_tanh_slope(s))                                                             \
    X(MISH, mish(x), g * mish_slope(s))                                                                                \
    X(HARDSIGMOID, clip(x + T(3), T(6)) / T(6), (s > T(-3)) & (s < T(3)) ? g * T(1.0f / 6.0f) : T(0))                  \
    X(SIGMOID, sigmoid_of(x), g * s * (T(1) - s))                                                                      \
    X(TANH, tanh_of(x), g * (T(1) - s * s))                                                                            \
    X(SOFTPLUS, x * a > b ? x : softplus_of(x * a) / a, s * a > b ? g : g * sigmoid_of(s * a))                         \
    X(EXP, exp_of(x), g * s)                                                                                           \
    X(EXPM1, expm1_of(x), g * (s + T(1)))                                                                              \
    X(LOG, log_of(x), g / s)                                                                                           \
    X(LOG1P, log1p_of(x), g / (s + T(1)))                                                                              \
    X(SQRT, std::sqrt(x), g / (s + s))                                                                                 \
    X(RSQRT, T(1) / std::sqrt(x), T(-0.5) * g * s * s * s)                                                             \
    X(RECIPROCAL, T(1) / x, -g * s * s)                                                                                \
    X(ABS, x < T(0) ? -x : x + T(0), s > T(0) ? g : s < T(0) ? -g : g * T(0))                                          \
    X(SIGN, T(x > T(0)) - T(x < T(0)), T(0))                                                                           \
    X(SQUARE, x * x, g * (s + s))                                                                                      \
    X(CUBE, x * x * x, T(3) * g * s * s)                                                                               \
    X(POWER, power_of(x, a, b), g * (a * power_of(s, a - T(1), -b)))                                                   \
    X(CLAMP, x < a ? a : x > b ? b : x, (s >= a) & (s <= b) ? g : T(0))                                                \
    X(SIN, sine_of(x, 0), g * sine_of(s, 1))                                                                           \
    X(COS, sine_of(x, 1), -g * sine_of(s, 0))                                                                          \
    X(ERF, erf_of(x), g * T(1.12837916709551257390) * exp_of(-s * s))                                                  \
    X(SOFTSHRINK, x > a ? x - a : x < -a ? x + a : x * T(0), (s >= -a) & (s <= a) ? T(0) : g)                          \
    X(HARDSHRINK, (x >= -a) & (x <= a) ? T(0) : x, (s >= -a) & (s <= a) ? T(0) : g)                                    \
    X(THRESHOLD, x <= a ? b : x, s <= a ? T(0) : g)                                                                    \
    X(ROOT, std::sqrt(x), s == T(0) ? T(0) : g / (s + s))

enum Function {
#define X(name, of, back) name,
    ESPER_FUNCTIONS(X)
#undef X
};

// Between 0 and `most`; NaN stays.
template <class T> inline T clip(T x, T most) {
    const T low = x < T(0) ? T(0) : x;
    return low > most ? most : low;
}

template <class T> inline T silu_slope(T x) {
    const T open = sigmoid_of(x);
    return open * (T(1) + x * (T(1) - open));
}

// (1 + tanh(u)) / 2 = sigmoid(2 u), of which no digits cancel.
constexpr double GELU_FACTOR = 2.0 * 0.79788456080286535588, GELU_CUBIC = 0.044715;
template <class T> inline T gelu_gate(T x) { return sigmoid_of(T(GELU_FACTOR) * (x + T(GELU_CUBIC) * (x * x * x))); }

template <class T> inline T gelu_tanh_slope(T x) {
    const T gate = gelu_gate(x);
    return gate + x * gate * (T(1) - gate) * (T(GELU_FACTOR) * (T(1) + T(3 * GELU_CUBIC) * (x * x)));
}

// tanh(log(1 + e)) = w / (w + 2), w = e (e + 2), for e = exp(x). Beyond 20 it is 1.
template <class T> inline T mish(T x) {
    const T e = exp_of(x > T(20) ? T(20) : x), w = e * (e + T(2));
    return x * (w / (w + T(2)));
}

template <class T> inline T mish_slope(T x) {
    const T bounded = x > T(20) ? T(20) : x;
    const T e = exp_of(bounded), w = e * (e + T(2)), below = T(1) / (w + T(2));
    return w * below + bounded * (T(4) * e * (T(1) + e) * below * below);
}

#define X(name, f, f_back)                                                                                             \
    template <class T> struct Of_##name {                                                                              \
        T a, b, c;                                                                                                     \
        static constexpr Function function = name;                                                                     \
        T of(T x) const { return f; }                                                                                  \
        T back(T s, T g) const { return f_back; }                                                                      \
    };
ESPER_FUNCTIONS(X)
#undef X

// Calls use(f) with the function of this kind.
template <class T, class Use> void with_function(int kind, const double* number, Use use) {
    const T a = T(number[0]), b = T(number[1]), c = T(number[2]);
    switch (kind) {
#define X(name, of, back) case name: return use(Of_##name<T>{a, b, c});
        ESPER_FUNCTIONS(X)
#undef X
    }
}

// The same of those that can be part of a normalization.
template <class T, class Use> void with_simple_function(int kind, const double* number, Use use) {
    const T a = T(number[0]), b = T(number[1]);
    switch (kind) {
        case RELU: return use(Of_RELU<T>{a, b, T(0)});
        case HARDTANH: return use(Of_HARDTANH<T>{a, b, T(0)});
        case SILU: return use(Of_SILU<T>{a, b, T(0)});
        case HARDSWISH: return use(Of_HARDSWISH<T>{a, b, T(0)});
        default: return use(Of_IDENTITY<T>{a, b, T(0)});
    }
}

// The same of vectors. Lanes of a vector are handled in memory where a function is more than a comparison.
template <class T, class F> inline wide<T> value_of(F f, wide<T> x) {
    if constexpr (F::function == IDENTITY) return x;
    else if constexpr (F::function == RELU) return x <= T(0) ? wide<T>{} : x;
    T part[width<T>()];
    store<T>(part, x);
#pragma omp simd
    for (int i = 0; i < width<T>(); ++i) part[i] = f.of(part[i]);
    return load(part);
}

template <class T, class F> inline wide<T> slope_of(F f, wide<T> saved, wide<T> g) {
    if constexpr (F::function == IDENTITY) return g;
    else if constexpr (F::function == RELU) return saved <= T(0) ? wide<T>{} : g;
    T part[width<T>()], other[width<T>()];
    store<T>(part, saved);
    store<T>(other, g);
#pragma omp simd
    for (int i = 0; i < width<T>(); ++i) other[i] = f.back(part[i], other[i]);
    return load(other);
}

// n = {rows}
template <class T> void run_ACTIVATE(const Call<T>& c) {
    int rows = c.n[0], lanes = c.chunk.lanes, stride = c.chunk.stride;
    merge_rows(rows, lanes, stride);
    with_function<T>(c.flag, c.number, [&](auto f) {
        const T* x = c.p[0];
        T* y = c.p[1];
        for (int r = 0; r < rows; ++r, x += stride, y += stride) {
            ESPER_EACH_LANE y[lane] = f.of(x[lane]);
        }
    });
}

// In place: p[1] is the gradient of the output and becomes that of the input.
template <class T> void run_ACTIVATE_BACKWARD(const Call<T>& c) {
    int rows = c.n[0], lanes = c.chunk.lanes, stride = c.chunk.stride;
    merge_rows(rows, lanes, stride);
    with_function<T>(c.flag, c.number, [&](auto f) {
        const T* saved = c.p[0];
        T* g = c.p[1];
        for (int r = 0; r < rows; ++r, saved += stride, g += stride) {
            ESPER_EACH_LANE g[lane] = f.back(saved[lane], g[lane]);
        }
    });
}

// n = {channels, space}: a slope for each channel.
template <class T> void run_PRELU(const Call<T>& c) {
    int space = c.n[1], lanes = c.chunk.lanes, stride = c.chunk.stride;
    merge_rows(space, lanes, stride);
    const T* x = c.p[0];
    T* y = c.p[2];
    for (int k = 0; k < c.n[0]; ++k)
        for (int m = 0; m < space; ++m, x += stride, y += stride) {
            const T slope = c.p[1][k];
            ESPER_EACH_LANE y[lane] = x[lane] > T(0) ? x[lane] : slope * x[lane];
        }
}

// p = {x, slopes, g (in place), gradient of the slopes}
template <class T> void run_PRELU_BACKWARD(const Call<T>& c) {
    int space = c.n[1], lanes = c.chunk.lanes, stride = c.chunk.stride;
    merge_rows(space, lanes, stride);
    const T* x = c.p[0];
    T* g = c.p[2];
    for (int k = 0; k < c.n[0]; ++k) {
        const T slope = c.p[1][k];
        T sum = T(0);
        for (int m = 0; m < space; ++m, x += stride, g += stride) {
#pragma omp simd reduction(+ : sum)
            for (int lane = 0; lane < lanes; ++lane) {
                sum += x[lane] > T(0) ? T(0) : x[lane] * g[lane];
                g[lane] = x[lane] > T(0) ? g[lane] : slope * g[lane];
            }
        }
        if (c.p[3]) c.p[3][k] += sum;
    }
}

// -- batch normalization ----------------------------------------------------------------------------------------------

// y = f((x - mean) rstd weight + bias + other): an activation function and a residual may follow. Numbers of an
// instruction: eps, momentum, those of the function; sizes: channels, space; flag: the function.
template <class T> struct Scaled {
    T center, scale, shift;
    T of(T x) const { return (x - center) * scale + shift; }
};

template <class T> inline Scaled<T> scaled(T center, T rstd, const T* weight, const T* bias, int c) {
    return {center, weight ? rstd * weight[c] : rstd, bias ? bias[c] : T(0)};
}

template <class T, class F>
void normalize(int64_t rows, Scaled<T> norm, F f, const T* x, const T* other, T* y, int lanes, int64_t stride) {
    for (int64_t m = 0; m < rows; ++m, x += stride, y += stride) {
        if (other) {
            ESPER_EACH_LANE y[lane] = f.of(norm.of(x[lane]) + other[lane]);
            other += stride;
        } else {
            ESPER_EACH_LANE y[lane] = f.of(norm.of(x[lane]));
        }
    }
}

// each(at, left, part) adds to part[k] for the vector that begins `at` and has `left` lanes: sum[k] is increased by all
// of them. There are several vectors of each sum, so that additions need not wait for each other.
template <class T, int SUMS, class Each> void sum_each(int rows, int lanes, int64_t stride, T (&sum)[SUMS], Each each) {
    constexpr int W = width<T>(), SEVERAL = REGISTERS / 8;
    wide<T> part[SEVERAL][SUMS] = {};
    for (int m = 0; m < rows; ++m) {
        const int64_t begin = m * stride;
        int lane = 0;
        for (; lane + SEVERAL * W <= lanes; lane += SEVERAL * W)
            for (int v = 0; v < SEVERAL; ++v) each(begin + lane + v * W, W, part[v]);
        for (; lane + W <= lanes; lane += W) each(begin + lane, W, part[0]);
        if (lane < lanes) {
            wide<T> last[SUMS] = {};
            each(begin + lane, lanes - lane, last);
            for (int k = 0; k < SUMS; ++k)
                for (int i = 0; i < lanes - lane; ++i) sum[k] += last[k][i];
        }
    }
    for (int k = 0; k < SUMS; ++k) {
        for (int v = 1; v < SEVERAL; ++v) part[0][k] += part[v][k];
        sum[k] += total<T>(part[0][k]);
    }
}

// By the batch's statistics, saved in p[5], p[6] = mean, rstd [channels] for the backward pass; running statistics
// (p[3], p[4] or null) are unbiased. p = {x, weight, bias, running mean, running variance, mean, rstd, y, other}
template <class T> void run_BATCH_NORM(const Call<T>& c) {
    int space = c.n[1], lanes = c.chunk.lanes, stride = c.chunk.stride;
    const T before = T(space) * c.chunk.before, own = T(space) * lanes, count = T(space) * c.chunk.batch;
    const T eps = T(c.number[0]), momentum = T(c.number[1]);
    const int64_t channel = static_cast<int64_t>(space) * stride;
    merge_rows(space, lanes, stride);
    with_simple_function<T>(c.flag, c.number + 2, [&](auto f) {
        T *mean = c.p[5], *rstd = c.p[6];
        for (int k = 0; k < c.n[0]; ++k) {
            const T* x = c.p[0] + k * channel;
            if (c.half & SUMS_OF_BATCH) {  // `rstd` is the sum of squares until the last chunk
                T sum[1] = {}, squares[1] = {};
                sum_each<T>(space, lanes, stride, sum, [=](int64_t at, int, wide<T>* to) { to[0] += load(x + at); });
                const T center = sum[0] / own;
                sum_each<T>(space, lanes, stride, squares, [=](int64_t at, int, wide<T>* to) {
                    const wide<T> away = load(x + at) - center;
                    to[0] += away * away;
                });
                const T step = center - mean[k], share = own / (before + own);
                mean[k] += step * share;
                rstd[k] += squares[0] + step * step * before * share;
                if (c.chunk.last()) {
                    if (c.p[3]) c.p[3][k] += momentum * (mean[k] - c.p[3][k]);
                    if (c.p[4]) c.p[4][k] += momentum * (rstd[k] / (count - T(1)) - c.p[4][k]);
                    rstd[k] = T(1) / std::sqrt(rstd[k] / count + eps);
                }
            }
            if (c.half & FEATURES)
                normalize(space, scaled(mean[k], rstd[k], c.p[1], c.p[2], k), f, x,
                          c.p[8] ? c.p[8] + k * channel : nullptr, c.p[7] + k * channel, lanes, stride);
        }
    });
}

// p = {x, weight, bias, mean, rstd, sums [channels][2], g, y, gradient of x, of weight, of bias}. With an `other`, `y`
// is given, and what passed the activation function is left in `g`: it is the gradient of `other`. Without it, the
// function's argument is computed again from x. The gradient of x may overwrite `g`.
template <class T> void run_BATCH_NORM_BACKWARD(const Call<T>& c) {
    int space = c.n[1], lanes = c.chunk.lanes, stride = c.chunk.stride;
    const T count = T(space) * c.chunk.batch;
    const int64_t channel = static_cast<int64_t>(space) * stride;
    merge_rows(space, lanes, stride);
    with_simple_function<T>(c.flag, c.number + 2, [&](auto f) {
        const bool leaves = c.p[7] || f.function > HARDTANH;  // one pass of an expensive function is enough
        for (int k = 0; k < c.n[0]; ++k) {
            const T *x = c.p[0] + k * channel, *y = c.p[7] ? c.p[7] + k * channel : nullptr;
            T *g = c.p[6] + k * channel, *out = c.p[8] + k * channel;
            T &sum = c.p[5][2 * k], &product = c.p[5][2 * k + 1];
            const Scaled<T> norm = scaled(c.p[3][k], c.p[4][k], c.p[1], c.p[2], k);
            if (c.half & SUMS_OF_BATCH) {
                T sums[2] = {};
                sum_each<T>(space, lanes, stride, sums, [=](int64_t at, int left, wide<T>* to) {
                    const wide<T> away = load(x + at) - norm.center;
                    const wide<T> saved = y ? load(y + at) : away * norm.scale + norm.shift;
                    const wide<T> inner = slope_of<T>(f, saved, load(g + at));
                    if (leaves) store_lanes<T>(g + at, inner, left);
                    to[0] += inner;
                    to[1] += inner * away;
                });
                sum += sums[0];
                product += sums[1] * c.p[4][k];
                if (c.chunk.last()) {
                    if (c.p[9]) c.p[9][k] += product;
                    if (c.p[10]) c.p[10][k] += sum;
                }
            }
            if (c.half & FEATURES) {
                const T a = sum / count, b = product / count * c.p[4][k];
                for (int m = 0; m < space; ++m) {
                    const int64_t begin = static_cast<int64_t>(m) * stride;
                    const T *row = x + begin, *grad = g + begin;
                    T* to = out + begin;
                    if (leaves) {
                        ESPER_EACH_LANE to[lane] = norm.scale * (grad[lane] - a - (row[lane] - norm.center) * b);
                    } else {
                        ESPER_EACH_LANE {
                            const T inner = f.back(norm.of(row[lane]), grad[lane]);
                            to[lane] = norm.scale * (inner - a - (row[lane] - norm.center) * b);
                        }
                    }
                }
            }
        }
    });
}

// By the running statistics. p = {x, weight, bias, running mean, running variance, y, other}
template <class T> void run_BATCH_NORM_FIXED(const Call<T>& c) {
    int space = c.n[1], lanes = c.chunk.lanes, stride = c.chunk.stride;
    const int64_t channel = static_cast<int64_t>(space) * stride;
    merge_rows(space, lanes, stride);
    with_simple_function<T>(c.flag, c.number + 2, [&](auto f) {
        for (int k = 0; k < c.n[0]; ++k) {
            const T rstd = T(1) / std::sqrt(c.p[4][k] + T(c.number[0]));
            normalize(space, scaled(c.p[3][k], rstd, c.p[1], c.p[2], k), f, c.p[0] + k * channel,
                      c.p[6] ? c.p[6] + k * channel : nullptr, c.p[5] + k * channel, lanes, stride);
        }
    });
}

// p = {x, weight, bias, running mean, running variance, g, y, gradient of x, of weight, of bias}, as above.
template <class T> void run_BATCH_NORM_FIXED_BACKWARD(const Call<T>& c) {
    int space = c.n[1], lanes = c.chunk.lanes, stride = c.chunk.stride;
    const int64_t channel = static_cast<int64_t>(space) * stride;
    merge_rows(space, lanes, stride);
    with_simple_function<T>(c.flag, c.number + 2, [&](auto f) {
        for (int k = 0; k < c.n[0]; ++k) {
            const T rstd = T(1) / std::sqrt(c.p[4][k] + T(c.number[0]));
            const Scaled<T> norm = scaled(c.p[3][k], rstd, c.p[1], c.p[2], k);
            T sum = T(0), product = T(0);
            for (int m = 0; m < space; ++m) {
                const int64_t begin = k * channel + static_cast<int64_t>(m) * stride;
                const T *x = c.p[0] + begin, *y = c.p[6] ? c.p[6] + begin : nullptr;
                T *g = c.p[5] + begin, *out = c.p[7] + begin;
                if (y) {
                    ESPER_EACH_LANE g[lane] = f.back(y[lane], g[lane]);
                } else {
                    ESPER_EACH_LANE g[lane] = f.back(norm.of(x[lane]), g[lane]);
                }
#pragma omp simd reduction(+ : sum, product)
                for (int lane = 0; lane < lanes; ++lane) {
                    sum += g[lane];
                    product += g[lane] * (x[lane] - norm.center);
                    out[lane] = g[lane] * norm.scale;
                }
            }
            if (c.p[8]) c.p[8][k] += product * rstd;
            if (c.p[9]) c.p[9][k] += sum;
        }
    });
}

// -- normalization of each example: group, layer, instance and RMS ----------------------------------------------------

// Rows are groups, each of `channels` of `space` rows. A channel has a weight and a bias: those of its group alone, or
// all groups have the same ones (layer normalization). Then an activation function f and a factor gamma may follow.
struct Groups {
    int groups, channels, space;
    int own;  // groups that have weights of their own, before they repeat; 0: none
    int weights() const { return (own ? own : 1) * channels; }
    int weight_of(int group, int channel) const { return own ? group % own * channels + channel : channel; }
};

inline Groups groups_of(const int32_t* n) { return {n[0], n[1], n[2], n[3]}; }

// Mean and 1 / standard deviation over rows, for VS vectors of lanes: several, so that additions need not wait for each
// other. One pass computes both by Welford's update, FEW rows at a time relative to the mean of the rows before. An
// outlier in those rows costs no precision: cancellation is small against the variance that the outlier adds. Without
// `mean`: 1 / root of the mean square.
template <class T, int VS>
void moments(int rows, T eps, const T* x, T* mean, T* rstd, int lanes, int stride) {
    constexpr int FEW = 16;
    wide<T> center[VS] = {}, squares[VS] = {};
    if (mean)
        for (int v = 0; v < VS; ++v) center[v] = load(x + v * width<T>());
    for (int done = 0; done < rows;) {
        wide<T> sum[VS] = {}, square[VS] = {};
        for (const int end = done + FEW < rows ? done + FEW : rows; done < end; ++done, x += stride)
            for (int v = 0; v < VS; ++v) {
                const wide<T> away = load(x + v * width<T>()) - center[v];
                sum[v] += away;
                square[v] += away * away;
            }
        for (int v = 0; v < VS; ++v) {
            const wide<T> step = mean ? sum[v] * (T(1) / T(done)) : wide<T>{};
            center[v] += step;
            squares[v] += square[v] - sum[v] * step;
        }
    }
    for (int v = 0; v < VS; ++v) {
        T part[width<T>()];
        store<T>(part, squares[v] / T(rows));
#pragma omp simd
        for (int i = 0; i < width<T>(); ++i) part[i] = T(1) / std::sqrt((part[i] < T(0) ? T(0) : part[i]) + eps);
        if (mean) store_lanes<T>(mean + v * width<T>(), center[v], lanes - v * width<T>());
        store_lanes<T>(rstd + v * width<T>(), load(part), lanes - v * width<T>());
    }
}

// p = {x, weight, bias, gamma, mean [groups][stride] (null: RMS), rstd, y}; numbers: eps (negative: the smallest of T),
// none, those of the function; sizes: Groups; flag: the function.
template <class T> void run_GROUP_NORM(const Call<T>& c) {
    constexpr int SEVERAL = REGISTERS / 8;
    const Groups n = groups_of(c.n);
    const int lanes = c.chunk.lanes, stride = c.chunk.stride, rows = n.channels * n.space;
    const T eps = c.number[0] < 0.0 ? std::numeric_limits<T>::epsilon() : T(c.number[0]);
    const T *x = c.p[0], *weight = c.p[1], *bias = c.p[2], *gamma = c.p[3];
    T *mean = c.p[4], *rstd = c.p[5], *y = c.p[6];
    with_simple_function<T>(c.flag, c.number + 2, [&](auto f) {
        for (int k = 0; k < n.groups; ++k, rstd += stride) {
            int at = 0;
            const auto moment = [&](auto compute, int vectors) {
                for (; at + vectors * width<T>() <= stride; at += vectors * width<T>())
                    compute(rows, eps, x + at, mean ? mean + at : nullptr, rstd + at, lanes - at, stride);
            };
            moment(moments<T, SEVERAL>, SEVERAL);
            moment(moments<T, 2>, 2);
            moment(moments<T, 1>, 1);
            for (int j = 0; j < n.channels; ++j) {
                const int of = n.weight_of(k, j);
                const T w = weight ? weight[of] : T(1), shift = bias ? bias[of] : T(0);
                const T factor = gamma ? gamma[of] : T(1);
                for (int m = 0; m < n.space; ++m, x += stride, y += stride) {
                    if (mean) {
                        ESPER_EACH_LANE y[lane] = f.of((x[lane] - mean[lane]) * (rstd[lane] * w) + shift) * factor;
                    } else {
                        ESPER_EACH_LANE y[lane] = f.of(x[lane] * (rstd[lane] * w) + shift) * factor;
                    }
                }
            }
            if (mean) mean += stride;
        }
    });
}

// The backward pass of group k for VS vectors of lanes, from `at` on; see run_GROUP_NORM_BACKWARD.
template <class T, int VS, class F> void group_norm_backward(const Call<T>& c, Groups n, F f, int k, int at) {
    constexpr int W = width<T>();
    const int stride = c.chunk.stride, left = c.chunk.lanes - at;
    const T *weight = c.p[1], *bias = c.p[2], *gamma = c.p[3];
    const int64_t stats = int64_t(k) * stride + at, begin = int64_t(k) * n.channels * n.space * stride + at;
    wide<T> center[VS] = {}, scale[VS], first[VS] = {}, second[VS] = {};
    for (int v = 0; v < VS; ++v) {
        if (c.p[4]) center[v] = load(c.p[4] + stats + v * W);
        scale[v] = load(c.p[5] + stats + v * W);
    }
    const T* row = c.p[0] + begin;
    T* grad = c.p[6] + begin;
    for (int j = 0; j < n.channels; ++j) {
        const int of = n.weight_of(k, j);
        const T w = weight ? weight[of] : T(1), shift = bias ? bias[of] : T(0), factor = gamma ? gamma[of] : T(1);
        wide<T> of_weight[VS] = {}, of_bias[VS] = {}, of_gamma[VS] = {};
        for (int m = 0; m < n.space; ++m, row += stride, grad += stride)
            for (int v = 0; v < VS; ++v) {
                const wide<T> normed = (load(row + v * W) - center[v]) * scale[v];
                wide<T> inner = load(grad + v * W);
                if (F::function != IDENTITY || gamma) {
                    const wide<T> argument = normed * w + shift;
                    if (gamma) {
                        of_gamma[v] += inner * value_of<T>(f, argument);
                        inner *= factor;
                    }
                    inner = slope_of<T>(f, argument, inner);
                }
                of_weight[v] += inner * normed;
                of_bias[v] += inner;
                store<T>(grad + v * W, inner * w);
            }
        T* sum = c.p[10] + static_cast<int64_t>(of) * 3 * W;
        for (int v = 0; v < VS; ++v) {
            first[v] += of_bias[v] * w;
            second[v] += of_weight[v] * w;
            store<T>(sum, load(sum) + of_weight[v]);
            store<T>(sum + W, load(sum + W) + of_bias[v]);
            if (gamma) store<T>(sum + 2 * W, load(sum + 2 * W) + of_gamma[v]);
        }
    }
    const T count = T(n.channels) * n.space;
    for (int v = 0; v < VS; ++v) {
        first[v] = c.p[4] ? first[v] / count : wide<T>{};
        second[v] /= count;
    }
    row = c.p[0] + begin, grad = c.p[6] + begin;
    for (int r = 0; r < n.channels * n.space; ++r, row += stride, grad += stride)
        for (int v = 0; v < VS; ++v) {
            const wide<T> normed = (load(row + v * W) - center[v]) * scale[v];
            store_lanes<T>(grad + v * W, scale[v] * (load(grad + v * W) - first[v] - normed * second[v]), left - v * W);
        }
}

// p = {x, weight, bias, gamma, mean, rstd, g (in place), gradients of weight, bias and gamma, scratch}. In scratch are
// gradients before the lanes are added up: [weights][3][width].
template <class T> void run_GROUP_NORM_BACKWARD(const Call<T>& c) {
    constexpr int W = width<T>();
    const Groups n = groups_of(c.n);
    T* sums = c.p[10];
    std::memset(sums, 0, sizeof(T) * n.weights() * 3 * W);
    with_simple_function<T>(c.flag, c.number + 2, [&](auto f) {
        for (int k = 0; k < n.groups; ++k) {
            int at = 0;
            for (; at + 2 * W <= c.chunk.stride; at += 2 * W) group_norm_backward<T, 2>(c, n, f, k, at);
            for (; at < c.chunk.stride; at += W) group_norm_backward<T, 1>(c, n, f, k, at);
        }
    });
    for (int of = 0; of < n.weights(); ++of, sums += 3 * W)
        for (int which = 0; which < 3; ++which)
            if (T* grad = c.p[7 + which]) grad[of] += total<T>(load(sums + which * W));
}

// -- softmax ----------------------------------------------------------------------------------------------------------

// n = {outer, size, inner}: over the middle axis, sixteen lanes at a time. flag: its logarithm.
constexpr int SIDE = 16;

#define ESPER_EACH_OF_SIDE _Pragma("omp simd") for (int i = 0; i < SIDE; ++i)

// Calls use(first row, row without the middle axis, lanes), both with their lanes.
template <class T, class Use> void each_line(const Call<T>& c, Use use) {
    const int stride = c.chunk.stride;
    for (int o = 0; o < c.n[0]; ++o)
        for (int k = 0; k < c.n[2]; ++k)
            for (int at = 0; at < stride; at += SIDE)
                use((static_cast<int64_t>(o) * c.n[1] * c.n[2] + k) * stride + at,
                    (static_cast<int64_t>(o) * c.n[2] + k) * stride + at, c.chunk.lanes - at);
}

template <class T> void run_SOFTMAX(const Call<T>& c) {
    const int size = c.n[1];
    const int64_t step = static_cast<int64_t>(c.n[2]) * c.chunk.stride;
    each_line(c, [&](int64_t begin, int64_t, int lanes) {
        const T* x = c.p[0] + begin;
        T* y = c.p[1] + begin;
        T best[SIDE], sum[SIDE] = {};
        ESPER_EACH_OF_SIDE best[i] = x[i];
        for (int j = 1; j < size; ++j) {
            ESPER_EACH_OF_SIDE best[i] = later_wins(best[i], x[j * step + i]) ? x[j * step + i] : best[i];
        }
        for (int j = 0; j < size; ++j) {
            ESPER_EACH_OF_SIDE {
                const T away = x[j * step + i] - best[i], value = exp_of(away);
                sum[i] += value;
                y[j * step + i] = c.flag ? away : value;
            }
        }
        if (c.flag) {
            ESPER_EACH_OF_SIDE sum[i] = log_of(sum[i]);
            for (int j = 0; j < size; ++j) {
                ESPER_EACH_OF_SIDE y[j * step + i] = i < lanes ? y[j * step + i] - sum[i] : T(0);
            }
            return;
        }
        ESPER_EACH_OF_SIDE sum[i] = i < lanes ? T(1) / sum[i] : T(0);
        for (int j = 0; j < size; ++j) {
            ESPER_EACH_OF_SIDE y[j * step + i] *= sum[i];
        }
    });
}

// p = {y, g (in place)}
template <class T> void run_SOFTMAX_BACKWARD(const Call<T>& c) {
    const int size = c.n[1];
    const int64_t step = static_cast<int64_t>(c.n[2]) * c.chunk.stride;
    each_line(c, [&](int64_t begin, int64_t, int lanes) {
        const T* y = c.p[0] + begin;
        T* g = c.p[1] + begin;
        T sum[SIDE] = {};
        for (int j = 0; j < size; ++j) {
            ESPER_EACH_OF_SIDE sum[i] += c.flag ? g[j * step + i] : g[j * step + i] * y[j * step + i];
        }
        for (int j = 0; j < size; ++j) {
            ESPER_EACH_OF_SIDE {
                const T own = g[j * step + i], of = y[j * step + i];
                const T value = c.flag ? own - exp_of(of) * sum[i] : of * (own - sum[i]);
                g[j * step + i] = i < lanes ? value : T(0);
            }
        }
    });
}

enum Reduction { LARGEST, SMALLEST, LOG_SUM };

// n as above: the largest or smallest number along the middle axis (NaN wins), or the logarithm of the sum of
// exponentials.
// p = {x, y}
template <class T> void run_REDUCE(const Call<T>& c) {
    const int size = c.n[1];
    const int64_t step = static_cast<int64_t>(c.n[2]) * c.chunk.stride;
    const T sign = c.flag == SMALLEST ? T(-1) : T(1);
    each_line(c, [&](int64_t begin, int64_t out, int lanes) {
        const T* x = c.p[0] + begin;
        T best[SIDE], sum[SIDE] = {};
        ESPER_EACH_OF_SIDE best[i] = sign * x[i];
        for (int j = 1; j < size; ++j) {
            ESPER_EACH_OF_SIDE best[i] = later_wins(best[i], sign * x[j * step + i]) ? sign * x[j * step + i] : best[i];
        }
        if (c.flag == LOG_SUM) {  // an infinite number is the sum
            for (int j = 0; j < size; ++j) {
                ESPER_EACH_OF_SIDE sum[i] += exp_of(x[j * step + i] - best[i]);
            }
            ESPER_EACH_OF_SIDE best[i] += best[i] - best[i] == T(0) ? log_of(sum[i]) : T(0);
        }
        ESPER_EACH_OF_SIDE c.p[1][out + i] = i < lanes ? sign * best[i] : T(0);
    });
}

// p = {x, y, g, gradient of x}. Equal extremes share the gradient, or the first one gets it (number[0]).
template <class T> void run_REDUCE_BACKWARD(const Call<T>& c) {
    const int size = c.n[1];
    const int64_t step = static_cast<int64_t>(c.n[2]) * c.chunk.stride;
    const bool first = c.number[0] != 0.0;
    each_line(c, [&](int64_t begin, int64_t out, int lanes) {
        const T *x = c.p[0] + begin, *y = c.p[1] + out, *g = c.p[2] + out;
        T* grad = c.p[3] + begin;
        T count[SIDE] = {};
        for (int j = 0; j < size; ++j) {
            ESPER_EACH_OF_SIDE {
                const T own = x[j * step + i], share = c.flag == LOG_SUM ? exp_of(own - y[i])
                                                       : own == y[i] || (own != own && y[i] != y[i]) ? T(1) : T(0);
                grad[j * step + i] = first && count[i] > T(0) ? T(0) : share;
                count[i] += share;
            }
        }
        ESPER_EACH_OF_SIDE count[i] = i < lanes ? (first || c.flag == LOG_SUM ? g[i] : g[i] / count[i]) : T(0);
        for (int j = 0; j < size; ++j) {
            ESPER_EACH_OF_SIDE grad[j * step + i] = i < lanes ? grad[j * step + i] * count[i] : T(0);
        }
    });
}

// -- pooling ----------------------------------------------------------------------------------------------------------

// n = {channels, height, width of the input, of the output, kernel, stride, padding, dilation of each axis, whether the
// windows share out the input (adaptive)}
struct Windows {
    int channels, size[2], out[2], kernel[2], stride[2], padding[2], dilation[2];
    bool adaptive;

    int first(int axis, int i) const {  // may lie in the padding
        return adaptive ? int(int64_t(i) * size[axis] / out[axis]) : i * stride[axis] - padding[axis];
    }
    int begin(int axis, int i) const {  // the first that does not
        const int at = first(axis, i), step = dilation[axis];
        return at >= 0 ? at : at + (-at + step - 1) / step * step;
    }
    int end(int axis, int i) const {
        if (adaptive) return int((int64_t(i + 1) * size[axis] + out[axis] - 1) / out[axis]);
        return std::min(first(axis, i) + (kernel[axis] - 1) * dilation[axis] + 1, size[axis]);
    }
};

inline Windows windows_of(const int32_t* n) {
    return {n[0], {n[1], n[2]}, {n[3], n[4]}, {n[5], n[6]}, {n[7], n[8]}, {n[9], n[10]}, {n[11], n[12]}, n[13] != 0};
}

// Whether windows are the squares 2x2 side by side.
inline bool are_squares(const Windows& w) {
    bool found = !w.adaptive;
    for (int k = 0; k < 2; ++k)
        found = found && w.kernel[k] == 2 && w.stride[k] == 2 && w.padding[k] == 0 && w.dilation[k] == 1 &&
                w.out[k] * 2 <= w.size[k];
    return found;
}

template <class T>
void max_pool_squares(const Windows& w, const T* h, T* y, T* winners, int lanes, int stride) {
    for (int c = 0; c < w.channels; ++c)
        for (int i = 0; i < w.out[0]; ++i)
            for (int j = 0; j < w.out[1]; ++j, y += stride, winners += winners ? stride : 0) {
                const int corner = 2 * i * w.size[1] + 2 * j;
                const T* a = h + (static_cast<int64_t>(c) * w.size[0] * w.size[1] + corner) * stride;
                const T *b = a + stride, *d = a + static_cast<int64_t>(w.size[1]) * stride, *e = d + stride;
                if (!winners) {
                    ESPER_EACH_LANE {
                        const T upper = later_wins(a[lane], b[lane]) ? b[lane] : a[lane];
                        const T lower = later_wins(d[lane], e[lane]) ? e[lane] : d[lane];
                        y[lane] = later_wins(upper, lower) ? lower : upper;
                    }
                    continue;
                }
                const T first = T(corner), below = T(corner + w.size[1]);
                ESPER_EACH_LANE {
                    const bool is_b = later_wins(a[lane], b[lane]);
                    T best = is_b ? b[lane] : a[lane], winner = is_b ? first + T(1) : first;
                    const bool is_d = later_wins(best, d[lane]);
                    best = is_d ? d[lane] : best, winner = is_d ? below : winner;
                    const bool is_e = later_wins(best, e[lane]);
                    y[lane] = is_e ? e[lane] : best, winners[lane] = is_e ? below + T(1) : winner;
                }
            }
}

// p = {x, y, winners (or null)}: the place of each maximum in its channel.
template <class T> void run_MAX_POOL(const Call<T>& c) {
    const Windows w = windows_of(c.n);
    const int lanes = c.chunk.lanes, stride = c.chunk.stride;
    T *y = c.p[1], *winners = c.p[2];
    if (are_squares(w)) return max_pool_squares<T>(w, c.p[0], y, winners, lanes, stride);
    for (int k = 0; k < w.channels; ++k) {
        const T* x = c.p[0] + static_cast<int64_t>(k) * w.size[0] * w.size[1] * stride;
        for (int i = 0; i < w.out[0]; ++i)
            for (int j = 0; j < w.out[1]; ++j, y += stride, winners += winners ? stride : 0) {
                bool begun = false;
                ESPER_EACH_LANE y[lane] = -std::numeric_limits<T>::infinity();  // of a window without numbers
                if (winners) std::fill_n(winners, lanes, T(-1));
                for (int u = w.begin(0, i); u < w.end(0, i); u += w.dilation[0])
                    for (int v = w.begin(1, j); v < w.end(1, j); v += w.dilation[1]) {
                        const int at = u * w.size[1] + v;
                        const T* row = x + static_cast<int64_t>(at) * stride;
                        if (!begun) {
                            begun = true;
                            std::memcpy(y, row, sizeof(T) * lanes);
                            if (winners) std::fill_n(winners, lanes, T(at));
                        } else if (winners) {
                            ESPER_EACH_LANE {
                                const bool wins = later_wins(y[lane], row[lane]);
                                y[lane] = wins ? row[lane] : y[lane];
                                winners[lane] = wins ? T(at) : winners[lane];
                            }
                        } else {
                            ESPER_EACH_LANE y[lane] = later_wins(y[lane], row[lane]) ? row[lane] : y[lane];
                        }
                    }
            }
    }
}

// p = {winners, g, gradient of x}
template <class T> void run_MAX_POOL_BACKWARD(const Call<T>& c) {
    const Windows w = windows_of(c.n);
    const int lanes = c.chunk.lanes, stride = c.chunk.stride;
    const int64_t plane = static_cast<int64_t>(w.size[0]) * w.size[1] * stride;
    const T *winners = c.p[0], *g = c.p[1];
    const bool squares = are_squares(w);
    if (!squares || w.size[0] % 2 || w.size[1] % 2) std::memset(c.p[2], 0, sizeof(T) * w.channels * plane);
    for (int k = 0; k < w.channels; ++k) {
        T* grad = c.p[2] + k * plane;
        for (int i = 0; i < w.out[0]; ++i)
            for (int j = 0; j < w.out[1]; ++j, g += stride, winners += stride) {
                if (squares) {
                    const int corner = 2 * i * w.size[1] + 2 * j;
                    const T first = T(corner), below = T(corner + w.size[1]);
                    T* upper = grad + static_cast<int64_t>(corner) * stride;
                    T* lower = upper + static_cast<int64_t>(w.size[1]) * stride;
                    ESPER_EACH_LANE {
                        const T winner = winners[lane], value = g[lane];
                        upper[lane] = winner == first ? value : T(0);
                        upper[stride + lane] = winner == first + T(1) ? value : T(0);
                        lower[lane] = winner == below ? value : T(0);
                        lower[stride + lane] = winner == below + T(1) ? value : T(0);
                    }
                    continue;
                }
                for (int u = w.begin(0, i); u < w.end(0, i); u += w.dilation[0])
                    for (int v = w.begin(1, j); v < w.end(1, j); v += w.dilation[1]) {
                        const int at = u * w.size[1] + v;
                        T* to = grad + static_cast<int64_t>(at) * stride;
                        ESPER_EACH_LANE to[lane] += winners[lane] == T(at) ? g[lane] : T(0);
                    }
            }
    }
}

// What a sum over a window is multiplied by. flag: padding counts; number[0]: the divisor, if it is not 0.
template <class T> T share_of(const Call<T>& c, const Windows& w, int i, int j) {
    if (c.number[0] != 0.0) return T(1.0 / c.number[0]);
    const int index[2] = {i, j};
    int64_t count = 1;
    for (int axis = 0; axis < 2; ++axis) {
        const int last = w.first(axis, index[axis]) + w.kernel[axis];
        if (c.flag && !w.adaptive)
            count *= std::min(last, w.size[axis] + w.padding[axis]) - w.first(axis, index[axis]);
        else
            count *= w.end(axis, index[axis]) - w.begin(axis, index[axis]);
    }
    return count > 0 ? T(1.0 / double(count)) : T(0);
}

// p = {x, y}
template <class T> void run_AVERAGE_POOL(const Call<T>& c) {
    const Windows w = windows_of(c.n);
    const int stride = c.chunk.stride;
    T* y = c.p[1];
    for (int k = 0; k < w.channels; ++k) {
        const T* x = c.p[0] + static_cast<int64_t>(k) * w.size[0] * w.size[1] * stride;
        for (int i = 0; i < w.out[0]; ++i)
            for (int j = 0; j < w.out[1]; ++j, y += stride) {
                const int u0 = w.begin(0, i), u1 = w.end(0, i), v0 = w.begin(1, j), v1 = w.end(1, j);
                const T share = share_of(c, w, i, j);
                for (int at = 0; at < stride; at += width<T>()) {
                    wide<T> sum = {};
                    for (int u = u0; u < u1; ++u)
                        for (int v = v0; v < v1; ++v)
                            sum += load(x + (static_cast<int64_t>(u) * w.size[1] + v) * stride + at);
                    store<T>(y + at, sum * share);
                }
            }
    }
}

// p = {g, gradient of x}
template <class T> void run_AVERAGE_POOL_BACKWARD(const Call<T>& c) {
    const Windows w = windows_of(c.n);
    const int lanes = c.chunk.lanes, stride = c.chunk.stride;
    const int64_t plane = static_cast<int64_t>(w.size[0]) * w.size[1] * stride;
    const T* g = c.p[0];
    std::memset(c.p[1], 0, sizeof(T) * w.channels * plane);
    for (int k = 0; k < w.channels; ++k) {
        T* grad = c.p[1] + k * plane;
        for (int i = 0; i < w.out[0]; ++i)
            for (int j = 0; j < w.out[1]; ++j, g += stride) {
                const T share = share_of(c, w, i, j);
                for (int u = w.begin(0, i); u < w.end(0, i); ++u)
                    for (int v = w.begin(1, j); v < w.end(1, j); ++v) {
                        T* to = grad + (static_cast<int64_t>(u) * w.size[1] + v) * stride;
                        ESPER_EACH_LANE to[lane] += share * g[lane];
                    }
            }
    }
}

// -- resizing ---------------------------------------------------------------------------------------------------------

// n = {channels, height, width of the input, of the output}; flag: the rule; numbers: the step of each axis from one
// output to the next, as PyTorch computes it.
enum Resizing { NEAREST, NEAREST_EXACT, LINEAR, LINEAR_ALIGNED };

// Between which numbers of an axis output i lies, and how much of the second one it takes.
template <class T> struct Between {
    int first, second;
    T share;
};

template <class T> Between<T> between(int rule, int size, double step, int i) {
    if (rule <= NEAREST_EXACT) {  // PyTorch computes these in single precision whatever the tensors are
        const float at = rule == NEAREST ? float(i) * float(step) : (float(i) + 0.5f) * float(step);
        const int first = std::min(int(std::floor(at)), size - 1);
        return {first, first, T(0)};
    }
    const T from = rule == LINEAR_ALIGNED ? T(step) * T(i) : T(step) * (T(i) + T(0.5)) - T(0.5);
    const T at = from < T(0) ? T(0) : from;
    const int first = std::min(int(at), size - 1);
    return {first, std::min(first + 1, size - 1), std::min(std::max(at - T(first), T(0)), T(1))};
}

// Calls use(rows of the input's corners, their shares, row of the output).
template <class T, class Use> void each_resized(const Call<T>& c, Use use) {
    const int channels = c.n[0], height = c.n[1], width_ = c.n[2], rows = c.n[3], columns = c.n[4];
    std::vector<Between<T>> of_column(columns);
    for (int j = 0; j < columns; ++j) of_column[j] = between<T>(c.flag, width_, c.number[1], j);
    int64_t out = 0;
    for (int k = 0; k < channels; ++k)
        for (int i = 0; i < rows; ++i) {
            const Between<T> y = between<T>(c.flag, height, c.number[0], i);
            for (int j = 0; j < columns; ++j, ++out) {
                const Between<T> x = of_column[j];
                const int64_t upper = (static_cast<int64_t>(k) * height + y.first) * width_;
                const int64_t lower = (static_cast<int64_t>(k) * height + y.second) * width_;
                const int64_t corner[4] = {upper + x.first, upper + x.second, lower + x.first, lower + x.second};
                const T share[4] = {(T(1) - y.share) * (T(1) - x.share), (T(1) - y.share) * x.share,
                                    y.share * (T(1) - x.share), y.share * x.share};
                use(corner, share, out);
            }
        }
}

// p = {x, y}
template <class T> void run_RESIZE(const Call<T>& c) {
    const int lanes = c.chunk.lanes, stride = c.chunk.stride;
    each_resized(c, [&](const int64_t* corner, const T* share, int64_t out) {
        T* y = c.p[1] + out * stride;
        const T *a = c.p[0] + corner[0] * stride, *b = c.p[0] + corner[1] * stride;
        if (c.flag <= NEAREST_EXACT) {
            ESPER_EACH_LANE y[lane] = a[lane];
            return;
        }
        const T *d = c.p[0] + corner[2] * stride, *e = c.p[0] + corner[3] * stride;
        ESPER_EACH_LANE y[lane] = share[0] * a[lane] + share[1] * b[lane] + share[2] * d[lane] + share[3] * e[lane];
    });
}

// p = {g, gradient of x}
template <class T> void run_RESIZE_BACKWARD(const Call<T>& c) {
    const int lanes = c.chunk.lanes, stride = c.chunk.stride;
    std::memset(c.p[1], 0, sizeof(T) * c.n[0] * c.n[1] * c.n[2] * stride);
    each_resized(c, [&](const int64_t* corner, const T* share, int64_t out) {
        const T* g = c.p[0] + out * stride;
        for (int k = 0; k < (c.flag <= NEAREST_EXACT ? 1 : 4); ++k) {
            T* to = c.p[1] + corner[k] * stride;
            ESPER_EACH_LANE to[lane] += share[k] * g[lane];
        }
    });
}

}  // namespace esper
