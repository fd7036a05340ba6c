// Normalizations with the activation function, residual or factor that may follow, forward and backward, on rows of lanes.
//
// Gradients of weights are added to what other instructions gave. A weight that is a null pointer is 1, a bias 0.

#pragma once

#include "functions.h"

// X(name, operands): see program.cpp.
#define ESPER_NORMALIZATIONS(X) \
    X(BATCH_NORM, "xxxxxXXxx") X(BATCH_NORM_BACKWARD, "xxxxxXxxxxx") X(BATCH_NORM_FIXED, "xxxxxxx")                    \
    X(BATCH_NORM_FIXED_BACKWARD, "xxxxxxxxxx") X(GROUP_NORM, "xxxxxxx") X(GROUP_NORM_BACKWARD, "xxxxxxxxxxx")

namespace esper {

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
                    const wide<T> inner = derivative_of<T>(f, saved, load(g + at));
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
                    inner = derivative_of<T>(f, argument, inner);
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

}  // namespace esper
