// Pooling and resizing, forward and backward, on rows of lanes (lanes.h).

#pragma once

#include "lanes.h"

#include <algorithm>
#include <vector>

// X(name, operands): see program.cpp.
#define ESPER_POOLING(X) \
    X(MAX_POOL, "xxx") X(MAX_POOL_BACKWARD, "xxx") X(AVERAGE_POOL, "xx") X(AVERAGE_POOL_BACKWARD, "xx")                \
    X(RESIZE, "xx") X(RESIZE_BACKWARD, "xx")

namespace esper {

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
