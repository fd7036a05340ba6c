// Tensors as rows of lanes: how a batch becomes rows, copies and elementwise operations with broadcasting, sums over axes,
// parameters as rows; blending a seed into its host; the loss.
//
// Strides are in rows; an operation visits `count` positions of up to six axes.

#pragma once

#include "lanes.h"

#include <algorithm>

// X(name, operands): see program.cpp.
#define ESPER_TENSORS(X)                                                                                               \
    X(CLEAR, "X") X(LOAD, "mx") X(LOAD_TARGETS, "ex") X(STORE, "xm") X(BARRIER, "") X(COPY, "xx") X(FILL, "x")          \
    X(COMBINE, "xxx") X(AFFINE, "xx") X(SUM, "xxx") X(SPREAD, "xx")                                                    \
    X(SPREAD_BACKWARD, "xx") X(BLEND, "xxxxx") X(BLEND_BACKWARD, "xxxxxxx") X(CROSS_ENTROPY, "xelxx") X(ADD_SCORES, "xlx")

namespace esper {

// Calls each(first, second, third) for every position but those of the last axis, with the offsets in three operands.
template <class Each> void each_position(const int32_t* n, Each each) {
    constexpr int MOST = 6;
    const int axes = n[0] - 1;
    const int32_t* size = n + 1;
    int at[MOST] = {};
    int64_t offset[3] = {};
    for (;;) {
        each(offset[0], offset[1], offset[2]);
        int k = axes - 1;
        for (; k >= 0; --k) {
            const int32_t* stride = n + 1 + MOST + k;
            if (++at[k] < size[k]) {
                for (int o = 0; o < 3; ++o) offset[o] += stride[o * MOST];
                break;
            }
            for (int o = 0; o < 3; ++o) offset[o] -= int64_t(stride[o * MOST]) * (size[k] - 1);
            at[k] = 0;
        }
        if (k < 0) return;
    }
}

// Calls row(first, second, third, lanes) along the last axis; rows that follow each other in all operands that are
// given are one long row.
template <class T, class Row> void each_row(const Call<T>& c, int operands, Row row) {
    constexpr int MOST = 6;
    const int last = c.n[0] - 1, count = c.n[1 + last], stride = c.chunk.stride, lanes = c.chunk.lanes;
    int step[3] = {};
    bool together = lanes == stride;
    for (int o = 0; o < operands; ++o) {
        step[o] = c.n[1 + MOST * (o + 1) + last];
        together = together && step[o] == 1;
    }
    each_position(c.n, [&](int64_t a, int64_t b, int64_t d) {
        if (together) return row(a * stride, b * stride, d * stride, count * stride);
        for (int m = 0; m < count; ++m, a += step[0], b += step[1], d += step[2])
            row(a * stride, b * stride, d * stride, lanes);
    });
}

// Gradients are sums over the batch, to which several instructions may add: this one comes first.
template <class T> void run_CLEAR(const Call<T>&) {}

// n = {axes, sizes [6], strides of the target [6], of the source [6]}; flag: adds instead of overwriting.
template <class T> void run_COPY(const Call<T>& c) {
    each_row(c, 2, [&](int64_t to, int64_t from, int64_t, int lanes) {
        T* y = c.p[1] + to;
        const T* x = c.p[0] + from;
        if (c.flag) {
            ESPER_EACH_LANE y[lane] += x[lane];
        } else {
            ESPER_EACH_LANE y[lane] = x[lane];
        }
    });
}

// n = {rows}: all lanes become number[0].
template <class T> void run_FILL(const Call<T>& c) {
    for (int64_t r = 0; r < c.n[0]; ++r)
        for (int lane = 0; lane < c.chunk.lanes; ++lane) c.p[0][r * c.chunk.stride + lane] = T(c.number[0]);
}

enum Combination { ADDED, SUBTRACTED, MULTIPLIED, DIVIDED };

// y = a op number[0] b, with the strides of y, a, b.
template <class T> void run_COMBINE(const Call<T>& c) {
    const T factor = T(c.number[0]);
    each_row(c, 3, [&](int64_t to, int64_t first, int64_t second, int lanes) {
        T* y = c.p[2] + to;
        const T *a = c.p[0] + first, *b = c.p[1] + second;
        switch (c.flag) {
            case ADDED: ESPER_EACH_LANE y[lane] = a[lane] + factor * b[lane]; return;
            case SUBTRACTED: ESPER_EACH_LANE y[lane] = a[lane] - factor * b[lane]; return;
            case MULTIPLIED: ESPER_EACH_LANE y[lane] = a[lane] * b[lane]; return;
            default: ESPER_EACH_LANE y[lane] = a[lane] / b[lane];
        }
    });
}

// n = {rows}: y = number[0] x + number[1]; -0 as number[1] keeps the sign of zero.
template <class T> void run_AFFINE(const Call<T>& c) {
    const T factor = T(c.number[0]), shift = T(c.number[1]);
    for (int64_t r = 0; r < c.n[0]; ++r) {
        const T* x = c.p[0] + r * c.chunk.stride;
        T* y = c.p[1] + r * c.chunk.stride;
        const int lanes = c.chunk.lanes;
        ESPER_EACH_LANE y[lane] = factor * x[lane] + shift;
    }
}

// y += number[0] a b (b null: number[0] a), with the strides of y, which are 0 along summed axes, a, b; y is cleared
// before. flag: rows of y.
template <class T> void run_SUM(const Call<T>& c) {
    const int stride = c.chunk.stride, count = c.n[c.n[0]], last = c.n[0] - 1;
    const int64_t step[3] = {c.n[7 + last], c.n[13 + last], c.n[19 + last]};
    const T factor = T(c.number[0]);
    std::memset(c.p[2], 0, sizeof(T) * c.flag * stride);
    each_position(c.n, [&](int64_t to, int64_t first, int64_t second) {
        for (int at = 0; at < stride; at += width<T>()) {
            const T *a = c.p[0] + first * stride + at, *b = c.p[1] ? c.p[1] + second * stride + at : nullptr;
            T* y = c.p[2] + to * stride + at;
            if (step[0] == 0) {
                wide<T> sum = {};
                if (b)
                    for (int m = 0; m < count; ++m) sum += load(a + m * step[1] * stride) * load(b + m * step[2] * stride);
                else
                    for (int m = 0; m < count; ++m) sum += load(a + m * step[1] * stride);
                store<T>(y, load(y) + factor * sum);
                continue;
            }
            for (int m = 0; m < count; ++m) {
                const wide<T> value = b ? load(a + m * step[1] * stride) * load(b + m * step[2] * stride)
                                        : load(a + m * step[1] * stride);
                T* sum = y + m * step[0] * stride;
                store<T>(sum, load(sum) + factor * value);
            }
        }
    });
}

// n = {rows}: each number of a parameter in all lanes of its row, and the sum over lanes of the gradient.
template <class T> void run_SPREAD(const Call<T>& c) {
    for (int64_t r = 0; r < c.n[0]; ++r)
        for (int lane = 0; lane < c.chunk.lanes; ++lane) c.p[1][r * c.chunk.stride + lane] = c.p[0][r];
}

template <class T> void run_SPREAD_BACKWARD(const Call<T>& c) {
    for (int64_t r = 0; r < c.n[0]; ++r) c.p[1][r] += sum_of(c.p[0] + r * c.chunk.stride, c.chunk.lanes);
}

// -- blending a seed into its host (esper.kasmina.blending) -----------------------------------------------------------

enum Algorithm { BY_ADD, BY_MULTIPLY, BY_GATE };

template <class T>
void blend(int rows, int algorithm, int per_gate, const T* h, const T* delta, const T* gates, T alpha, T* y, int lanes,
           int stride) {
    if (algorithm != BY_GATE) merge_rows(rows, lanes, stride);
    for (int r = 0; r < rows; ++r, h += stride, delta += stride, y += stride) {
        const T* gate = gates ? gates + int64_t(r / per_gate) * stride : nullptr;
        if (algorithm == BY_ADD) {
            ESPER_EACH_LANE y[lane] = h[lane] + alpha * delta[lane];
        } else if (algorithm == BY_MULTIPLY) {
            ESPER_EACH_LANE y[lane] = h[lane] * (T(1) + alpha * tanh_of(delta[lane]));
        } else {
            ESPER_EACH_LANE y[lane] = h[lane] + alpha * gate[lane] * delta[lane];
        }
    }
}

// In place: `g` becomes the gradient of h. A seed that is not active is trained as if alpha were 1. MULTIPLY alone needs
// `h`; it needs `delta`, and so does the gradient of a gate.
template <class T>
void blend_backward(int rows, int algorithm, int per_gate, bool active, const T* h, const T* delta, const T* gates,
                    T alpha, T* g, T* grad_delta, T* grad_gates, int lanes, int stride) {
    if (grad_gates) std::memset(grad_gates, 0, sizeof(T) * (rows / per_gate) * stride);
    if (algorithm != BY_GATE) merge_rows(rows, lanes, stride);
    const T weight = active ? alpha : T(1);
    for (int r = 0; r < rows; ++r) {
        const int64_t begin = static_cast<int64_t>(r) * stride;
        const T *own = h ? h + begin : nullptr, *from = delta ? delta + begin : nullptr;
        T* grad = g + begin;
        T* to = grad_delta ? grad_delta + begin : nullptr;
        const T* gate = gates ? gates + int64_t(r / per_gate) * stride : nullptr;
        T* grad_gate = grad_gates ? grad_gates + int64_t(r / per_gate) * stride : nullptr;
        if (algorithm == BY_MULTIPLY) {
            ESPER_EACH_LANE {
                const T factor = tanh_of(from[lane]);
                if (to) to[lane] = weight * grad[lane] * own[lane] * (T(1) - factor * factor);
                if (active) grad[lane] += alpha * grad[lane] * factor;
            }
        } else if (algorithm == BY_ADD) {
            if (to) {
                ESPER_EACH_LANE to[lane] = weight * grad[lane];
            }
        } else if (to) {
            ESPER_EACH_LANE to[lane] = weight * grad[lane] * gate[lane];
            if (grad_gate) {
                ESPER_EACH_LANE grad_gate[lane] += weight * grad[lane] * from[lane];
            }
        }
    }
}

// n = {rows, algorithm, rows per row of the gate}; flag of the backward pass: whether the seed is active.
template <class T> void run_BLEND(const Call<T>& c) {
    blend<T>(c.n[0], c.n[1], c.n[2], c.p[0], c.p[1], c.p[2], *c.p[3], c.p[4], c.chunk.lanes, c.chunk.stride);
}

template <class T> void run_BLEND_BACKWARD(const Call<T>& c) {
    blend_backward<T>(c.n[0], c.n[1], c.n[2], c.flag, c.p[0], c.p[1], c.p[2], *c.p[3], c.p[4], c.p[5], c.p[6], c.chunk.lanes,
                      c.chunk.stride);
}

// -- input and loss ---------------------------------------------------------------------------------------------------

// n = {numbers}: a batch [lanes][numbers] to rows of lanes; n = {numbers, all}: back, to numbers of [lanes][all]. Tiles of
// both stay in the cache.
template <class T> void run_LOAD(const Call<T>& c) {
    constexpr int TILE = 16;
    const int rows = c.n[0], lanes = c.chunk.lanes, stride = c.chunk.stride;
    for (int first = 0; first < rows; first += TILE)
        for (int lane = 0; lane < stride; ++lane)
            for (int r = first; r < std::min(first + TILE, rows); ++r)
                c.p[1][int64_t(r) * stride + lane] = lane < lanes ? c.p[0][int64_t(lane) * rows + r] : T(0);
}

// n = {numbers}: targets [lanes][numbers] to rows of lanes. flag: they are integers, else in double precision.
template <class T> void run_LOAD_TARGETS(const Call<T>& c) {
    const int rows = c.n[0], lanes = c.chunk.lanes, stride = c.chunk.stride;
    for (int64_t r = 0; r < rows; ++r) {
        T* y = c.p[1] + r * stride;
        for (int64_t lane = 0; lane < stride; ++lane) {
            const int64_t at = lane * rows + r;
            y[lane] = lane >= lanes ? T(0) : c.flag ? T(c.template as<int64_t>(0)[at]) : T(c.template as<double>(0)[at]);
        }
    }
}

template <class T> void run_STORE(const Call<T>& c) {
    constexpr int TILE = 16;
    const int rows = c.n[0], lanes = c.chunk.lanes, stride = c.chunk.stride;
    for (int first = 0; first < rows; first += TILE)
        for (int lane = 0; lane < lanes; ++lane)
            for (int r = first; r < std::min(first + TILE, rows); ++r)
                c.p[1][int64_t(lane) * c.n[1] + r] = c.p[0][int64_t(r) * stride + lane];
}

// A program ends here, and goes on when the gradients of the outputs are known.
template <class T> void run_BARRIER(const Call<T>&) {}

// n = {classes, positions}: cross entropy of logits [positions][classes] and labels [lanes][positions]. Adds to `totals`
// = {sum of losses, correct answers, labels that count}; `grad` (or null) gets the gradient of the mean loss of the
// batch. Negative labels do not count. NativeExecutor checks the labels once. number = {smoothing}: the target is 1 -
// smoothing for the label, and smoothing / classes for every class, as in torch.nn.functional.cross_entropy.
template <class T> void run_CROSS_ENTROPY(const Call<T>& c) {
    const int classes = c.n[0], positions = c.n[1], lanes = c.chunk.lanes, stride = c.chunk.stride;
    const T smoothing = T(c.number[0]), mean = T(c.chunk.weight > 0.0 ? 1.0 / c.chunk.weight : 0.0);
    const int64_t* labels = c.template as<int64_t>(1);
    double* totals = c.template as<double>(2);
    T *best = c.p[4], *sum = best + stride, *answer = sum + stride;
    double loss = 0.0;
    int64_t correct = 0, counted = 0;
    for (int t = 0; t < positions; ++t) {
        const T* logits = c.p[0] + static_cast<int64_t>(t) * classes * stride;
        ESPER_EACH_LANE {
            best[lane] = logits[lane];
            sum[lane] = answer[lane] = T(0);
        }
        for (int k = 1; k < classes; ++k) {
            const T* row = logits + k * stride;
            ESPER_EACH_LANE {
                const bool wins = later_wins(best[lane], row[lane]);
                best[lane] = wins ? row[lane] : best[lane];
                answer[lane] = wins ? T(k) : answer[lane];
            }
        }
        for (int k = 0; k < classes; ++k) {
            const T* row = logits + k * stride;
            ESPER_EACH_LANE sum[lane] += exp_of(row[lane] - best[lane]);
        }
        double product = 1.0;  // of up to four sums: one logarithm for all
        for (int lane = 0; lane < lanes; ++lane) {
            const int64_t label = labels[lane * positions + t];
            if (label >= 0) {
                const T own = logits[label * stride + lane];
                loss += best[lane] - own;
                if (smoothing > T(0)) {
                    double total = 0.0;
                    for (int k = 0; k < classes; ++k) total += logits[k * stride + lane];
                    loss += smoothing * (own - total / classes);
                }
                product *= sum[lane];
                correct += answer[lane] == T(label) && std::isfinite(best[lane]);
                ++counted;
            }
            if (lane % 4 == 3 || lane + 1 == lanes) {
                loss += std::log(product);
                product = 1.0;
            }
        }
        if (!c.p[3]) continue;
        T* grad = c.p[3] + static_cast<int64_t>(t) * classes * stride;
        const T of_each = smoothing / T(classes);
        // lanes whose label does not count have no gradient, and a row of `answer` says which
        ESPER_EACH_LANE answer[lane] = labels[lane * positions + t] >= 0 ? mean : T(0);
        for (int k = 0; k < classes; ++k) {
            const T* row = logits + k * stride;
            T* out = grad + k * stride;
            ESPER_EACH_LANE out[lane] = (exp_of(row[lane] - best[lane]) / sum[lane] - of_each) * answer[lane];
        }
        for (int lane = 0; lane < lanes; ++lane)
            if (const int64_t label = labels[lane * positions + t]; label >= 0)
                grad[label * stride + lane] -= (T(1) - smoothing) * mean;
    }
    totals[0] += loss;
    totals[1] += double(correct);
    totals[2] += double(counted);
}

// Adds rows {losses, scores, weights} to `totals`, the sums of each; `grad` (or null) gets their gradient for the mean
// loss of the batch. flag: labels that are not negative count 1; else an example does.
template <class T> void run_ADD_SCORES(const Call<T>& c) {
    const int lanes = c.chunk.lanes, stride = c.chunk.stride;
    for (int k = 0; k < 3; ++k) {
        double sum = 0.0;
        for (int lane = 0; lane < lanes; ++lane) sum += double(c.p[0][k * stride + lane]);
        c.template as<double>(1)[k] += sum;
    }
    if (!c.p[2]) return;
    const double weight = c.flag ? c.chunk.weight : double(c.chunk.batch);
    std::memset(c.p[2], 0, sizeof(T) * 3 * stride);
    std::fill_n(c.p[2], lanes, T(weight > 0.0 ? 1.0 / weight : 0.0));
}

}  // namespace esper
