// All layers except convolutions, forward and backward, on rows of lanes (lanes.h).
//
// Gradients of weights are added to what the chunks before gave. "In place": `g` is the gradient of the output and
// becomes that of the input.

#pragma once

#include "lanes.h"

// X(name, operands): see program.cpp.
#define ESPER_LAYERS(X) X(BATCH_NORM, "xxxxxXXx") X(BATCH_NORM_BACKWARD, "xxxxxXXx") X(BATCH_NORM_FIXED, "xxxxxx") X(GROUP_NORM, "xxxxxxx") X(GROUP_NORM_BACKWARD, "xxxxxxxxxx") X(ACTIVATE, "xx") X(ACTIVATE_BACKWARD, "xx") X(MAX_POOL, "xxx") X(MAX_POOL_BACKWARD, "xxx")

namespace esper {

// -- batch normalization with ReLU ------------------------------------------------------------------------------------

template <class T> struct Affine {
    const T *weight, *bias;
};

// By the batch's statistics, saved in `mean` and `rstd` [C] for the backward pass; running statistics are unbiased.
template <class T>
void batch_norm(int half, int channels, int space, T eps, T momentum, const T* x, Affine<T> affine, T* running_mean,
                T* running_var, T* mean, T* rstd, T* y, Chunk chunk) {
    const T before = T(space) * chunk.before, own = T(space) * chunk.lanes, count = T(space) * chunk.batch;
    int lanes = chunk.lanes, stride = chunk.stride;
    merge_rows(space, lanes, stride);
    for (int c = 0; c < channels; ++c) {
        const T* from = x + static_cast<int64_t>(c) * space * stride;
        T* to = y + static_cast<int64_t>(c) * space * stride;
        if (half & SUMS_OF_BATCH) {  // `rstd` is the sum of squares until the last chunk
            T sum = T(0), squares = T(0);
            for (int m = 0; m < space; ++m) sum += sum_of(from + m * stride, lanes);
            const T center = sum / own, step = center - mean[c], share = own / (before + own);
            for (int m = 0; m < space; ++m) {
                const T* row = from + m * stride;
#pragma omp simd reduction(+ : squares)
                for (int lane = 0; lane < lanes; ++lane) squares += (row[lane] - center) * (row[lane] - center);
            }
            mean[c] += step * share;
            rstd[c] += squares + step * step * before * share;
            if (chunk.last()) {
                running_mean[c] += momentum * (mean[c] - running_mean[c]);
                running_var[c] += momentum * (rstd[c] / (count - T(1)) - running_var[c]);
                rstd[c] = T(1) / std::sqrt(rstd[c] / count + eps);
            }
        }
        if (half & FEATURES) {
            const T center = mean[c], scale = rstd[c] * affine.weight[c], shift = affine.bias[c];
            for (int m = 0; m < space; ++m) {
                const T* row = from + m * stride;
                T* out = to + m * stride;
                ESPER_EACH_LANE out[lane] = relu_of((row[lane] - center) * scale + shift);
            }
        }
    }
}

// In place. Whether the ReLU let a number through is computed again from `x`.
template <class T>
void batch_norm_backward(int half, int channels, int space, const T* x, Affine<T> affine, const T* mean, const T* rstd,
                         T* g, T* grad_weight, T* grad_bias, Chunk chunk) {
    const T count = T(space) * chunk.batch;
    int lanes = chunk.lanes, stride = chunk.stride;
    merge_rows(space, lanes, stride);
    for (int c = 0; c < channels; ++c) {
        const int64_t begin = static_cast<int64_t>(c) * space * stride;
        const T center = mean[c], scale = rstd[c] * affine.weight[c], shift = affine.bias[c];
        if (half & SUMS_OF_BATCH) {
            T sum = T(0), product = T(0);
            for (int m = 0; m < space; ++m) {
                const T *row = x + begin + m * stride, *grad = g + begin + m * stride;
#pragma omp simd reduction(+ : sum, product)
                for (int lane = 0; lane < lanes; ++lane) {
                    const T away = row[lane] - center, inner = away * scale + shift <= T(0) ? T(0) : grad[lane];
                    sum += inner;
                    product += inner * away;
                }
            }
            grad_weight[c] += product * rstd[c];
            grad_bias[c] += sum;
        }
        if (half & FEATURES) {
            const T a = grad_bias[c] / count, b = grad_weight[c] / count * rstd[c];
            for (int m = 0; m < space; ++m) {
                const T* row = x + begin + m * stride;
                T* grad = g + begin + m * stride;
                ESPER_EACH_LANE {
                    const T away = row[lane] - center, inner = away * scale + shift <= T(0) ? T(0) : grad[lane];
                    grad[lane] = scale * (inner - a - away * b);
                }
            }
        }
    }
}

// By the running statistics.
template <class T>
void batch_norm_fixed(int channels, int space, T eps, const T* x, Affine<T> affine, const T* running_mean,
                      const T* running_var, T* y, int lanes, int stride) {
    merge_rows(space, lanes, stride);
    for (int c = 0; c < channels; ++c) {
        const T scale = affine.weight[c] / std::sqrt(running_var[c] + eps), shift = affine.bias[c];
        const T center = running_mean[c];
        for (int m = 0; m < space; ++m) {
            const T* row = x + (static_cast<int64_t>(c) * space + m) * stride;
            T* out = y + (static_cast<int64_t>(c) * space + m) * stride;
            ESPER_EACH_LANE out[lane] = relu_of((row[lane] - center) * scale + shift);
        }
    }
}

// -- group normalization, ReLU and layer scale ------------------------------------------------------------------------

// Mean and 1 / standard deviation over rows, for VS vectors of lanes: several, so that additions need not wait for each
// other. One pass computes both by Welford's update, FEW rows at a time relative to the mean of the rows before. An
// outlier in those rows costs no precision: cancellation is small against the variance that the outlier adds.
template <class T, int VS>
void moments(int rows, T eps, const T* x, T* mean, T* rstd, int lanes, int stride) {
    constexpr int FEW = 16;
    wide<T> center[VS], squares[VS] = {};
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
            const wide<T> step = sum[v] * (T(1) / T(done));
            center[v] += step;
            squares[v] += square[v] - sum[v] * step;
        }
    }
    for (int v = 0; v < VS; ++v) {
        T part[width<T>()];
        store<T>(part, squares[v] / T(rows));
#pragma omp simd
        for (int i = 0; i < width<T>(); ++i) part[i] = T(1) / std::sqrt((part[i] < T(0) ? T(0) : part[i]) + eps);
        store_lanes<T>(mean + v * width<T>(), center[v], lanes - v * width<T>());
        store_lanes<T>(rstd + v * width<T>(), load(part), lanes - v * width<T>());
    }
}

// y = gamma * relu((x - mean) * rstd * weight + bias); ReLU and gamma are optional. `mean`, `rstd` [groups][stride].
template <class T>
void group_norm(int channels, int space, int groups, bool relu, T eps, const T* x, Affine<T> affine, const T* gamma,
                T* mean, T* rstd, T* y, int lanes, int stride) {
    constexpr int SEVERAL = REGISTERS / 8 * width<T>();
    const int per_group = channels / groups, rows = per_group * space;
    for (int k = 0; k < groups; ++k, mean += stride, rstd += stride) {
        int at = 0;
        for (; at + SEVERAL <= stride; at += SEVERAL)
            moments<T, REGISTERS / 8>(rows, eps, x + at, mean + at, rstd + at, lanes - at, stride);
        for (; at < stride; at += width<T>())
            moments<T, 1>(rows, eps, x + at, mean + at, rstd + at, lanes - at, stride);
        for (int c = k * per_group; c < (k + 1) * per_group; ++c) {
            const T w = affine.weight[c], shift = affine.bias[c], factor = gamma ? gamma[c] : T(1);
            for (int m = 0; m < space; ++m, x += stride, y += stride) {
                if (relu) {
                    ESPER_EACH_LANE y[lane] = relu_of((x[lane] - mean[lane]) * (rstd[lane] * w) + shift) * factor;
                } else {
                    ESPER_EACH_LANE y[lane] = ((x[lane] - mean[lane]) * (rstd[lane] * w) + shift) * factor;
                }
            }
        }
    }
}

// In place.
template <class T>
void group_norm_backward(int channels, int space, int groups, bool relu, const T* x, Affine<T> affine, const T* gamma,
                         const T* mean, const T* rstd, T* g, T* grad_weight, T* grad_bias, T* grad_gamma, int lanes,
                         int stride) {
    const int per_group = channels / groups;
    const T count = T(per_group) * space;
    for (int k = 0; k < groups; ++k)
        for (int at = 0; at < stride; at += width<T>()) {
            const int64_t begin = static_cast<int64_t>(k) * per_group * space * stride + at;
            const wide<T> center = load(mean + k * stride + at), scale = load(rstd + k * stride + at);
            wide<T> first = {}, second = {};
            const T* row = x + begin;
            T* grad = g + begin;
            for (int c = k * per_group; c < (k + 1) * per_group; ++c) {
                const T w = affine.weight[c], shift = affine.bias[c], factor = gamma ? gamma[c] : T(1);
                wide<T> of_weight = {}, of_bias = {}, of_gamma = {};
                for (int m = 0; m < space; ++m, row += stride, grad += stride) {
                    const wide<T> normed = (load(row) - center) * scale;
                    wide<T> value = normed * w + shift, outer = load(grad);
                    if (relu) {
                        outer = value <= T(0) ? wide<T>{} : outer;
                        value = value <= T(0) ? wide<T>{} : value;
                    }
                    of_gamma += outer * value;
                    const wide<T> inner = outer * factor;
                    of_weight += inner * normed;
                    of_bias += inner;
                    store<T>(grad, inner * w);
                }
                first += of_bias * w;
                second += of_weight * w;
                grad_weight[c] += total<T>(of_weight);
                grad_bias[c] += total<T>(of_bias);
                if (grad_gamma) grad_gamma[c] += total<T>(of_gamma);
            }
            const wide<T> a = first / count, b = second / count;
            row = x + begin, grad = g + begin;
            for (int r = 0; r < per_group * space; ++r, row += stride, grad += stride) {
                const wide<T> normed = (load(row) - center) * scale;
                store_lanes<T>(grad, scale * (load(grad) - a - normed * b), lanes - at);
            }
        }
}

// -- pooling and means ------------------------------------------------------------------------------------------------

// 2x2. `winners`: which of the four numbers is the largest, for the backward pass.
template <class T>
void max_pool(int channels, int height, int width, const T* h, T* y, T* winners, int lanes, int stride) {
    for (int c = 0; c < channels; ++c)
        for (int i = 0; i + 1 < height; i += 2)
            for (int j = 0; j + 1 < width; j += 2, y += stride, winners += stride) {
                const T* a = h + ((static_cast<int64_t>(c) * height + i) * width + j) * stride;
                const T *b = a + stride, *d = a + static_cast<int64_t>(width) * stride, *e = d + stride;
                ESPER_EACH_LANE {
                    const bool is_b = later_wins(a[lane], b[lane]);
                    T best = is_b ? b[lane] : a[lane], winner = is_b ? T(1) : T(0);
                    const bool is_d = later_wins(best, d[lane]);
                    best = is_d ? d[lane] : best, winner = is_d ? T(2) : winner;
                    const bool is_e = later_wins(best, e[lane]);
                    y[lane] = is_e ? e[lane] : best, winners[lane] = is_e ? T(3) : winner;
                }
            }
}

template <class T>
void max_pool_backward(int channels, int height, int width, const T* winners, const T* g, T* grad, int lanes,
                       int stride) {
    if (height % 2 || width % 2) std::memset(grad, 0, sizeof(T) * channels * height * width * stride);
    for (int c = 0; c < channels; ++c)
        for (int i = 0; i + 1 < height; i += 2)
            for (int j = 0; j + 1 < width; j += 2, g += stride, winners += stride) {
                T* upper = grad + ((static_cast<int64_t>(c) * height + i) * width + j) * stride;
                T* lower = upper + static_cast<int64_t>(width) * stride;
                ESPER_EACH_LANE {
                    const T winner = winners[lane], value = g[lane];
                    upper[lane] = winner == T(0) ? value : T(0);
                    upper[stride + lane] = winner == T(1) ? value : T(0);
                    lower[lane] = winner == T(2) ? value : T(0);
                    lower[stride + lane] = winner == T(3) ? value : T(0);
                }
            }
}

template <class T, int VS> void sum_rows(int rows, const T* h, T* y, T factor, int stride) {
    wide<T> sum[VS] = {};
    for (int r = 0; r < rows; ++r, h += stride)
        for (int v = 0; v < VS; ++v) sum[v] += load(h + v * width<T>());
    for (int v = 0; v < VS; ++v) store<T>(y + v * width<T>(), sum[v] * factor);
}

template <class T> void mean_space(int channels, int space, const T* h, T* y, int stride) {
    constexpr int SEVERAL = REGISTERS / 8 * width<T>();
    for (int c = 0; c < channels; ++c, y += stride, h += static_cast<int64_t>(space) * stride) {
        int at = 0;
        for (; at + SEVERAL <= stride; at += SEVERAL) sum_rows<T, REGISTERS / 8>(space, h + at, y + at, T(1) / T(space), stride);
        for (; at < stride; at += width<T>()) sum_rows<T, 1>(space, h + at, y + at, T(1) / T(space), stride);
    }
}

template <class T> void mean_space_backward(int channels, int space, const T* g, T* grad, int lanes, int stride) {
    for (int c = 0; c < channels; ++c, g += stride)
        for (int m = 0; m < space; ++m, grad += stride) {
            ESPER_EACH_LANE grad[lane] = g[lane] / T(space);
        }
}

// -- factors, biases, activations -------------------------------------------------------------------------------------

template <class T> void add_bias(int channels, int space, const T* bias, T* y, int lanes, int stride) {
    merge_rows(space, lanes, stride);
    for (int r = 0; r < channels * space; ++r, y += stride) {
        const T b = bias[r / space];
        ESPER_EACH_LANE y[lane] += b;
    }
}

template <class T> void add_bias_backward(int channels, int space, const T* g, T* grad_bias, int lanes, int stride) {
    merge_rows(space, lanes, stride);
    for (int c = 0; c < channels; ++c)
        for (int m = 0; m < space; ++m, g += stride) grad_bias[c] += sum_of(g, lanes);
}

// One factor per channel. Backward in place.
template <class T> void scale(int channels, int space, const T* gamma, const T* x, T* y, int lanes, int stride) {
    merge_rows(space, lanes, stride);
    for (int r = 0; r < channels * space; ++r, x += stride, y += stride) {
        const T factor = gamma[r / space];
        ESPER_EACH_LANE y[lane] = x[lane] * factor;
    }
}

template <class T>
void scale_backward(int channels, int space, const T* gamma, const T* x, T* g, T* grad_gamma, int lanes, int stride) {
    merge_rows(space, lanes, stride);
    for (int c = 0; c < channels; ++c) {
        const T factor = gamma[c];
        T sum = T(0);
        for (int m = 0; m < space; ++m, x += stride, g += stride) {
#pragma omp simd reduction(+ : sum)
            for (int lane = 0; lane < lanes; ++lane) {
                sum += g[lane] * x[lane];
                g[lane] *= factor;
            }
        }
        grad_gamma[c] += sum;
    }
}

// One factor per channel and example: y = h * factor.
template <class T> void modulate(int channels, int space, const T* h, const T* factor, T* y, int lanes, int stride) {
    for (int c = 0; c < channels; ++c, factor += stride)
        for (int m = 0; m < space; ++m, h += stride, y += stride) {
            ESPER_EACH_LANE y[lane] = h[lane] * factor[lane];
        }
}

template <class T> void modulate_backward(int channels, int space, const T* h, const T* g, T* grad_factor, int stride) {
    const int64_t channel = static_cast<int64_t>(space) * stride;
    for (int c = 0; c < channels; ++c, grad_factor += stride, h += channel, g += channel)
        for (int at = 0; at < stride; at += width<T>()) {
            wide<T> sum = {};
            for (int64_t row = at; row < channel; row += stride) sum += load(g + row) * load(h + row);
            store<T>(grad_factor + at, sum);
        }
}

// y = tanh(strength) * (z - h). Backward in place: `g` becomes the gradient of z.
template <class T> void shift(int rows, const T* strength, const T* z, const T* h, T* y, int lanes, int stride) {
    merge_rows(rows, lanes, stride);
    const T factor = tanh_of(*strength);
    for (int r = 0; r < rows; ++r, z += stride, h += stride, y += stride) {
        ESPER_EACH_LANE y[lane] = factor * (z[lane] - h[lane]);
    }
}

template <class T>
void shift_backward(int rows, const T* strength, const T* z, const T* h, T* g, T* grad_strength, int lanes,
                    int stride) {
    merge_rows(rows, lanes, stride);
    const T factor = tanh_of(*strength);
    T sum = T(0);
    for (int r = 0; r < rows; ++r, z += stride, h += stride, g += stride) {
#pragma omp simd reduction(+ : sum)
        for (int lane = 0; lane < lanes; ++lane) {
            sum += g[lane] * (z[lane] - h[lane]);
            g[lane] *= factor;
        }
    }
    *grad_strength += sum * (T(1) - factor * factor);
}

enum Activation { RELU, SILU, TANH, SIGMOID };

template <class T> void activate(int rows, int kind, const T* x, T* y, int lanes, int stride) {
    merge_rows(rows, lanes, stride);
    for (int r = 0; r < rows; ++r, x += stride, y += stride) {
        if (kind == RELU) {
            ESPER_EACH_LANE y[lane] = relu_of(x[lane]);
        } else if (kind == SILU) {
            ESPER_EACH_LANE y[lane] = x[lane] * sigmoid_of(x[lane]);
        } else if (kind == TANH) {
            ESPER_EACH_LANE y[lane] = tanh_of(x[lane]);
        } else {
            ESPER_EACH_LANE y[lane] = sigmoid_of(x[lane]);
        }
    }
}

// In place. `saved` is the input of SiLU, and the output of the others.
template <class T> void activate_backward(int rows, int kind, const T* saved, T* g, int lanes, int stride) {
    merge_rows(rows, lanes, stride);
    for (int r = 0; r < rows; ++r, saved += stride, g += stride) {
        if (kind == RELU) {
            ESPER_EACH_LANE g[lane] = saved[lane] <= T(0) ? T(0) : g[lane];
        } else if (kind == SILU) {
            ESPER_EACH_LANE {
                const T open = sigmoid_of(saved[lane]);
                g[lane] *= open * (T(1) + saved[lane] * (T(1) - open));
            }
        } else if (kind == TANH) {
            ESPER_EACH_LANE g[lane] *= T(1) - saved[lane] * saved[lane];
        } else {
            ESPER_EACH_LANE g[lane] *= saved[lane] * (T(1) - saved[lane]);
        }
    }
}

// -- instructions

template <class T> void run_BATCH_NORM(const Call<T>& c) {
    batch_norm<T>(c.half, c.n[0], c.n[1], T(c.number[0]), T(c.number[1]), c.p[0], {c.p[1], c.p[2]}, c.p[3], c.p[4], c.p[5],
                  c.p[6], c.p[7], c.chunk);
}
template <class T> void run_BATCH_NORM_BACKWARD(const Call<T>& c) {
    batch_norm_backward<T>(c.half, c.n[0], c.n[1], c.p[0], {c.p[1], c.p[2]}, c.p[3], c.p[4], c.p[7], c.p[5], c.p[6], c.chunk);
}
template <class T> void run_BATCH_NORM_FIXED(const Call<T>& c) {
    batch_norm_fixed<T>(c.n[0], c.n[1], T(c.number[0]), c.p[0], {c.p[1], c.p[2]}, c.p[3], c.p[4], c.p[5], c.chunk.lanes,
                        c.chunk.stride);
}


template <class T> void run_GROUP_NORM(const Call<T>& c) { group_norm<T>(c.n[0], c.n[1], c.n[2], c.flag, T(c.number[0]), c.p[0], {c.p[1], c.p[2]}, c.p[3], c.p[4], c.p[5], c.p[6], c.chunk.lanes, c.chunk.stride); }
template <class T> void run_GROUP_NORM_BACKWARD(const Call<T>& c) { group_norm_backward<T>(c.n[0], c.n[1], c.n[2], c.flag, c.p[0], {c.p[1], c.p[2]}, c.p[3], c.p[4], c.p[5], c.p[6], c.p[7], c.p[8], c.p[9], c.chunk.lanes, c.chunk.stride); }
template <class T> void run_ACTIVATE(const Call<T>& c) { activate<T>(c.n[0], c.flag, c.p[0], c.p[1], c.chunk.lanes, c.chunk.stride); }
template <class T> void run_ACTIVATE_BACKWARD(const Call<T>& c) { activate_backward<T>(c.n[0], c.flag, c.p[0], c.p[1], c.chunk.lanes, c.chunk.stride); }
template <class T> void run_MAX_POOL(const Call<T>& c) { max_pool<T>(c.n[0], c.n[1], c.n[2], c.p[0], c.p[1], c.p[2], c.chunk.lanes, c.chunk.stride); }
template <class T> void run_MAX_POOL_BACKWARD(const Call<T>& c) { max_pool_backward<T>(c.n[0], c.n[1], c.n[2], c.p[0], c.p[1], c.p[2], c.chunk.lanes, c.chunk.stride); }

}  // namespace esper
