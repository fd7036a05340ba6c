// Activation functions, softmax and extremes, forward and backward, on rows of lanes (lanes.h).

#pragma once

#include "lanes.h"

#include <algorithm>

// X(name, operands): see program.cpp.
#define ESPER_ACTIVATIONS(X) \
    X(ACTIVATE, "xx") X(ACTIVATE_BACKWARD, "xx") X(PRELU, "xxx") X(PRELU_BACKWARD, "xxxx") X(SOFTMAX, "xx")            \
    X(SOFTMAX_BACKWARD, "xx") X(REDUCE, "xx") X(REDUCE_BACKWARD, "xxxx")

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

// As exp_of; 2^n - 1 is added to the small part, so that nothing cancels.
inline float expm1_of(float x) {
    const float highest = 88.0f, lowest = -20.0f;
    float bounded = x > highest ? highest : x;
    bounded = bounded < lowest ? lowest : bounded;
    const Exponential parts = exponential(bounded);
    const float power = bits_of<float>((parts.bits << 23) + (127u << 23));
    const float value = parts.rest * power + (power - 1.0f);
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

// X(name, f(x), f' g), with the numbers a, b and c. `s` is what the backward pass keeps: x, or f(x) where
// functions.py says so. The first five can be part of a normalization. Comparisons are those of PyTorch, also at corners
// and NaN.
#define ESPER_FUNCTIONS(X)                                                                                             \
    X(IDENTITY, x, g)                                                                                                  \
    X(RELU, x <= T(0) ? T(0) : x, s <= T(0) ? T(0) : g)                                                                \
    X(HARDTANH, x < a ? a : x > b ? b : x, (s <= a) | (s >= b) ? T(0) : g)                                             \
    X(SILU, x * sigmoid_of(x), g * silu_derivative(s))                                                                      \
    X(HARDSWISH, x * clip(x + T(3), T(6)) / T(6), s <= T(-3) ? T(0) : s < T(3) ? g * (s / T(3) + T(0.5)) : g)          \
    X(LEAKY_RELU, x > T(0) ? x : x * a, s > T(0) ? g : g * a)                                                          \
    X(ELU, x > T(0) ? x * b : expm1_of(x * c) * a, s <= T(0) ? g * a * c * exp_of(s * c) : g * b)                      \
    X(GELU, T(0.5) * x * (T(1) + erf_of(x * T(M_SQRT1_2))),                                                            \
      g * (T(0.5) * (T(1) + erf_of(s * T(M_SQRT1_2))) + s * exp_of(T(-0.5) * s * s) * T(0.39894228040143267794)))      \
    X(GELU_TANH, x * gelu_gate(x), g * gelu_tanh_derivative(s))                                                             \
    X(MISH, mish(x), g * mish_derivative(s))                                                                                \
    X(HARDSIGMOID, clip(x + T(3), T(6)) / T(6), (s > T(-3)) & (s < T(3)) ? g * T(1.0f / 6.0f) : T(0))                  \
    X(SIGMOID, sigmoid_of(x), g * s * (T(1) - s))                                                                      \
    X(TANH, tanh_of(x), g * (T(1) - s * s))                                                                            \
    X(SOFTPLUS, x * a > b ? x : softplus_of(x * a) / a, s * a > b ? g : g * sigmoid_of(s * a))                         \
    X(EXP, exp_of(x), g * s)                                                                                           \
    X(LOG, log_of(x), g / s)                                                                                           \
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

template <class T> inline T silu_derivative(T x) {
    const T open = sigmoid_of(x);
    return open * (T(1) + x * (T(1) - open));
}

// (1 + tanh(u)) / 2 = sigmoid(2 u), of which no digits cancel.
constexpr double GELU_FACTOR = 2.0 * 0.79788456080286535588, GELU_CUBIC = 0.044715;
template <class T> inline T gelu_gate(T x) { return sigmoid_of(T(GELU_FACTOR) * (x + T(GELU_CUBIC) * (x * x * x))); }

template <class T> inline T gelu_tanh_derivative(T x) {
    const T gate = gelu_gate(x);
    return gate + x * gate * (T(1) - gate) * (T(GELU_FACTOR) * (T(1) + T(3 * GELU_CUBIC) * (x * x)));
}

// tanh(log(1 + e)) = w / (w + 2), w = e (e + 2), for e = exp(x). Beyond 20 it is 1.
template <class T> inline T mish(T x) {
    const T e = exp_of(x > T(20) ? T(20) : x), w = e * (e + T(2));
    return x * (w / (w + T(2)));
}

template <class T> inline T mish_derivative(T x) {
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
    with_function<T>(kind, number, [&](auto f) {
        if constexpr (decltype(f)::function <= HARDSWISH) use(f);
    });
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

template <class T, class F> inline wide<T> derivative_of(F f, wide<T> saved, wide<T> g) {
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

// -- softmax ----------------------------------------------------------------------------------------------------------

// n = {outer, size, inner}: over the middle axis, LANES at a time. flag: its logarithm.
#define ESPER_EACH_OF_LANES _Pragma("omp simd") for (int i = 0; i < LANES; ++i)

// Calls use(first row, row without the middle axis, lanes), both with their lanes.
template <class T, class Use> void each_line(const Call<T>& c, Use use) {
    const int stride = c.chunk.stride;
    for (int o = 0; o < c.n[0]; ++o)
        for (int k = 0; k < c.n[2]; ++k)
            for (int at = 0; at < stride; at += LANES)
                use((static_cast<int64_t>(o) * c.n[1] * c.n[2] + k) * stride + at,
                    (static_cast<int64_t>(o) * c.n[2] + k) * stride + at, c.chunk.lanes - at);
}

template <class T> void run_SOFTMAX(const Call<T>& c) {
    const int size = c.n[1];
    const int64_t step = static_cast<int64_t>(c.n[2]) * c.chunk.stride;
    each_line(c, [&](int64_t begin, int64_t, int lanes) {
        const T* x = c.p[0] + begin;
        T* y = c.p[1] + begin;
        T best[LANES], sum[LANES] = {};
        ESPER_EACH_OF_LANES best[i] = x[i];
        for (int j = 1; j < size; ++j) {
            ESPER_EACH_OF_LANES best[i] = later_wins(best[i], x[j * step + i]) ? x[j * step + i] : best[i];
        }
        for (int j = 0; j < size; ++j) {
            ESPER_EACH_OF_LANES {
                const T away = x[j * step + i] - best[i], value = exp_of(away);
                sum[i] += value;
                y[j * step + i] = c.flag ? away : value;
            }
        }
        if (c.flag) {
            ESPER_EACH_OF_LANES sum[i] = log_of(sum[i]);
            for (int j = 0; j < size; ++j) {
                ESPER_EACH_OF_LANES y[j * step + i] = i < lanes ? y[j * step + i] - sum[i] : T(0);
            }
            return;
        }
        ESPER_EACH_OF_LANES sum[i] = i < lanes ? T(1) / sum[i] : T(0);
        for (int j = 0; j < size; ++j) {
            ESPER_EACH_OF_LANES y[j * step + i] *= sum[i];
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
        T sum[LANES] = {};
        for (int j = 0; j < size; ++j) {
            ESPER_EACH_OF_LANES sum[i] += c.flag ? g[j * step + i] : g[j * step + i] * y[j * step + i];
        }
        for (int j = 0; j < size; ++j) {
            ESPER_EACH_OF_LANES {
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
        T best[LANES], sum[LANES] = {};
        ESPER_EACH_OF_LANES best[i] = sign * x[i];
        for (int j = 1; j < size; ++j) {
            ESPER_EACH_OF_LANES best[i] = later_wins(best[i], sign * x[j * step + i]) ? sign * x[j * step + i] : best[i];
        }
        if (c.flag == LOG_SUM) {  // an infinite number is the sum
            for (int j = 0; j < size; ++j) {
                ESPER_EACH_OF_LANES sum[i] += exp_of(x[j * step + i] - best[i]);
            }
            ESPER_EACH_OF_LANES best[i] += best[i] - best[i] == T(0) ? log_of(sum[i]) : T(0);
        }
        ESPER_EACH_OF_LANES c.p[1][out + i] = i < lanes ? sign * best[i] : T(0);
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
        T count[LANES] = {};
        for (int j = 0; j < size; ++j) {
            ESPER_EACH_OF_LANES {
                const T own = x[j * step + i], share = c.flag == LOG_SUM ? exp_of(own - y[i])
                                                       : own == y[i] || (own != own && y[i] != y[i]) ? T(1) : T(0);
                grad[j * step + i] = first && count[i] > T(0) ? T(0) : share;
                count[i] += share;
            }
        }
        ESPER_EACH_OF_LANES count[i] = i < lanes ? (first || c.flag == LOG_SUM ? g[i] : g[i] / count[i]) : T(0);
        for (int j = 0; j < size; ++j) {
            ESPER_EACH_OF_LANES grad[j * step + i] = i < lanes ? grad[j * step + i] * count[i] : T(0);
        }
    });
}

}  // namespace esper
