// Convolutions and linear layers on rows of lanes, forward and backward: any kernel, stride, padding, dilation, groups.
//
//     convolution     in [C][H][W][lanes]     weight [O][C / groups][kh][kw]     out [O][H'][W'][lanes]
//     product         in [T][I][lanes]        weight [O][I]                      out [T][O][lanes]
//
// At each position only the taps inside the image are computed, so no product is with padding.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "lanes.h"

// X(name, operands): see program.cpp.
#define ESPER_CONVOLUTIONS(X)                                                                                          \
    X(CONVOLVE, "xxxxx") X(CONVOLVE_INPUT_GRAD, "xxxx") X(CONVOLVE_WEIGHT_GRAD, "xxxxx")                               \
    X(MULTIPLY, "xxxxx") X(MULTIPLY_INPUT_GRAD, "xxxx") X(MULTIPLY_WEIGHT_GRAD, "xxxxx")

// Few steps over vectors: unrolled, so that arrays of vectors stay in registers.
#define ESPER_UNROLLED(i, count) _Pragma("GCC unroll 32") for (int i = 0; i < count; ++i)

namespace esper {

constexpr int SUMS = REGISTERS / 4;                            // outputs whose sums are computed at once
constexpr int64_t FIRST_CACHE = 32768, SECOND_CACHE = 524288;  // bytes that every processor has

struct Shape {  // of a convolution; what is padded at the bottom and right follows from the size of the output
    int inputs, outputs, groups, height, width, out_height, out_width;
    int kernel_h, kernel_w, stride_h, stride_w, pad_top, pad_left, dilation_h, dilation_w;
    int taps() const { return kernel_h * kernel_w; }
    int reach() const { return (kernel_h - 1) * dilation_h + 1; }  // rows of the image from the first tap to the last
};

struct Product {  // a linear layer for each position of a sequence
    int positions, inputs, outputs;
};

// -- which taps a position has ----------------------------------------------------------------------------------------

// One axis of the image: at output x, tap k reads input (x * up + shift + k * tap) / down, if that is whole and inside.
// The gradient of the input is a convolution of this kind, too.
struct Axis {
    int outputs, inputs, kernel, up, down, shift, tap;
};

// Positions first, first + step, ... that have the same taps: tap, tap + tap_step, ... The first tap reads `source` at
// the first position and `source_step` further at each next one; each next tap reads `tap_source` further.
struct Run {
    int first, step, count, source, source_step, tap, tap_step, taps, tap_source;
    Run positions(int from, int most) const {
        Run some = *this;
        some.first += from * step, some.source += from * source_step, some.count = std::min(count - from, most);
        return some;
    }
    Run some_taps(int from, int most) const {
        Run some = *this;
        some.tap += from * tap_step, some.source += from * tap_source, some.taps = std::min(taps - from, most);
        return some;
    }
};
using Runs = std::vector<Run>;

inline Runs runs_of(const Axis& a) {
    Runs runs;
    for (int phase = 0; phase < std::min(a.down, a.outputs); ++phase) {
        Run all{phase, a.down, 0, 0, a.up, 0, 1, 0, 0};  // with every tap that reads whole positions
        for (int k = 0; k < a.kernel; ++k) {
            const int source = phase * a.up + a.shift + k * a.tap;
            if (source % a.down) continue;
            if (all.taps == 0) all.tap = k, all.source = source / a.down;
            if (all.taps == 1) all.tap_step = k - all.tap, all.tap_source = source / a.down - all.source;
            ++all.taps;
        }
        int low_before = -1, high_before = -1;
        for (; all.first < a.outputs; all.first += a.down, all.source += a.up) {
            const auto outside = [&](int i) {
                const int source = all.source + i * all.tap_source;
                return source < 0 || source >= a.inputs;
            };
            int low = 0, high = all.taps;
            while (low < high && outside(low)) ++low;
            while (low < high && outside(high - 1)) --high;
            if (low != low_before || high != high_before) runs.push_back(all.some_taps(low, high - low));
            ++runs.back().count;
            low_before = low, high_before = high;
        }
    }
    return runs;
}

// Of the output, or of the input, whose gradient each run computes.
inline Runs rows_of(const Shape& s, bool grad = false) {
    return grad ? runs_of({s.height, s.out_height, s.kernel_h, 1, s.stride_h, s.pad_top, -s.dilation_h})
                : runs_of({s.out_height, s.height, s.kernel_h, s.stride_h, 1, -s.pad_top, s.dilation_h});
}
inline Runs columns_of(const Shape& s, bool grad = false) {
    return grad ? runs_of({s.width, s.out_width, s.kernel_w, 1, s.stride_w, s.pad_left, -s.dilation_w})
                : runs_of({s.out_width, s.width, s.kernel_w, s.stride_w, 1, -s.pad_left, s.dilation_w});
}
inline Runs positions_of(int count) { return {{0, 1, count, 0, 1, 0, 1, 1, 0}}; }

struct Distances {  // in numbers, between neighbours in the features
    int64_t channel, row, column;
};
inline Distances image(int height, int width, int stride) {
    return {int64_t(height) * width * stride, int64_t(width) * stride, stride};
}
inline Distances sequence(int features, int stride) { return {stride, int64_t(features) * stride, 0}; }

// -- sums over inputs and taps ----------------------------------------------------------------------------------------

// out[o] = bias[o] + sum of weight[o][c][tap] * in[c], each at the place of the tap. Vectors are along the lanes, so
// each weight is broadcast from where it is.
template <class T> struct Sums {
    const T *in, *weight, *bias;
    T* out;
    int inputs, outputs;
    Distances from, to;
    int64_t weight_output, weight_input, weight_row;
    int lanes, stride;
    bool add = false;  // to what `out` holds
};

template <class T> inline wide<T> keep_lanes(wide<T> value, int lanes_left) {
    wide<T> lane;
    for (int i = 0; i < width<T>(); ++i) lane[i] = T(i);
    return lane < T(lanes_left) ? value : wide<T>{};
}

// Not inline: few vectors need it, and it would keep the sums of `block` from staying in registers.
template <class T> __attribute__((noinline)) void put_lanes(T* to, wide<T> value, int lanes_left, bool add) {
    if (!add) return store<T>(to, keep_lanes<T>(value, lanes_left));
    T part[width<T>()];
    store<T>(part, value);
    for (int i = 0; i < std::min(lanes_left, width<T>()); ++i) to[i] += part[i];
}

struct Spot {  // one vector: where its sources begin, where it goes, how many of its lanes are examples
    int64_t from, to;
    int lanes;
};

struct Step {  // from one tap to the next, in the input and in the weights
    int64_t from, weight;
};
using Steps = std::vector<Step>;

// From each tap of two runs to the next one, and from the last tap to the first one of the next input.
template <class T> void steps_of(const Sums<T>& s, const Run& y, const Run& x, Steps& steps) {
    const Step right{x.tap_source * s.from.column, x.tap_step};
    const Step down{y.tap_source * s.from.row - (x.taps - 1) * right.from,
                    y.tap_step * s.weight_row - (x.taps - 1) * right.weight};
    steps.assign(x.taps * y.taps, right);
    for (int k = x.taps; k < x.taps * y.taps; k += x.taps) steps[k - 1] = down;
    if (steps.empty()) return;
    Step sum{0, 0};
    for (size_t i = 0; i + 1 < steps.size(); ++i) sum.from += steps[i].from, sum.weight += steps[i].weight;
    steps.back() = {s.from.channel - sum.from, s.weight_input - sum.weight};
}

// One loop over inputs and taps: nested ones are too short for the processor to foresee their ends.
template <class T, int OS, int VS>
void block(const Sums<T>& s, const Steps& steps, const Spot* spots, const T* weight, int o) {
    wide<T> sum[OS][VS];
    ESPER_UNROLLED(i, OS) ESPER_UNROLLED(v, VS) sum[i][v] = wide<T>{} + (s.bias ? s.bias[o + i] : T(0));
    const int64_t next = s.weight_output;
    const T *h = s.in + spots[0].from, *w[3];  // w: of every third output, as few registers hold addresses
    int64_t apart[VS];
    ESPER_UNROLLED(v, VS) apart[v] = spots[v].from - spots[0].from;
    ESPER_UNROLLED(i, 3) w[i] = weight + (o + 3 * i) * next;
    const Step *step = steps.data(), *end = step + steps.size();
    for (int left = s.inputs * int(steps.size()); left > 0; --left) {
        wide<T> here[VS];
        ESPER_UNROLLED(v, VS) here[v] = load(h + apart[v]);
        ESPER_UNROLLED(i, OS) ESPER_UNROLLED(v, VS) sum[i][v] += w[i / 3][i % 3 * next] * here[v];
        h += step->from;
        ESPER_UNROLLED(i, 3) w[i] += step->weight;
        ++step;
        step = step == end ? steps.data() : step;
    }
    bool full = true;
    ESPER_UNROLLED(v, VS) full &= spots[v].lanes >= width<T>();
    ESPER_UNROLLED(i, OS) ESPER_UNROLLED(v, VS) {
        T* to = s.out + (o + i) * s.to.channel + spots[v].to;
        if (full) store<T>(to, s.add ? load(to) + sum[i][v] : sum[i][v]);
        else put_lanes<T>(to, sum[i][v], spots[v].lanes, s.add);
    }
}

// As many sums as the registers hold.
template <class T, int OS>
void blocks_of(const Sums<T>& s, const Steps& steps, const Spot* spots, int count, const T* weight, int o) {
    constexpr int VS = OS == SUMS ? 3 : SUMS == 8 ? 6 : 4;
    for (int done; count > 0; spots += done, count -= done) {
        done = count >= VS && !(VS == 3 && count == 4) ? VS : count >= 2 ? 2 : 1;
        if (done == VS) block<T, OS, VS>(s, steps, spots, weight, o);
        else if (done == 2) block<T, OS, 2>(s, steps, spots, weight, o);
        else block<T, OS, 1>(s, steps, spots, weight, o);
    }
}

// Outputs from `o` to `last`.
template <class T>
void blocks(const Sums<T>& s, const Steps& steps, const Spot* spots, int count, const T* weight, int o, int last) {
    for (int done; o < last; o += done) {
        const int left = last - o;
        done = left >= SUMS ? SUMS : left >= SUMS / 2 ? SUMS / 2 : left;
        if (done == SUMS) blocks_of<T, SUMS>(s, steps, spots, count, weight, o);
        else if (done == SUMS / 2) blocks_of<T, SUMS / 2>(s, steps, spots, count, weight, o);
        else if (done == 3) blocks_of<T, 3>(s, steps, spots, count, weight, o);
        else if (done == 2) blocks_of<T, 2>(s, steps, spots, count, weight, o);
        else blocks_of<T, 1>(s, steps, spots, count, weight, o);
    }
}

// The same at the positions of two runs.
template <class T>
void rectangle(const Sums<T>& s, const Run& y, const Run& x, const Steps& steps, int first, int last) {
    constexpr int SPOTS = 6;  // for which all outputs follow each other, if the weights stay in the first cache
    const int per = s.stride / width<T>(), vectors = y.count * x.count * per;
    const int parts = (vectors + SPOTS - 1) / SPOTS, most = (vectors + parts - 1) / parts;
    const T* weight = s.weight + y.tap * s.weight_row + x.tap;
    const Spot right{x.source_step * s.from.column - s.stride, x.step * s.to.column - s.stride, s.stride};
    const Spot down{y.source_step * s.from.row - x.count * x.source_step * s.from.column,
                    y.step * s.to.row - x.count * x.step * s.to.column, 0};
    Spot spots[SPOTS], next{y.source * s.from.row + x.source * s.from.column,
                            y.first * s.to.row + x.first * s.to.column, s.lanes};
    for (int done = 0, vector = 0, column = 0, count; done < vectors; done += count) {
        count = std::min(most, vectors - done);
        for (int k = 0; k < count; ++k) {
            spots[k] = next;
            next.from += width<T>(), next.to += width<T>(), next.lanes -= width<T>();
            if (++vector < per) continue;
            vector = 0, next.from += right.from, next.to += right.to, next.lanes += right.lanes;
            if (++column < x.count) continue;
            column = 0, next.from += down.from, next.to += down.to;
        }
        blocks(s, steps, spots, count, weight, first, last);
    }
}

// Parts of the image whose inputs stay in the second cache. Weights that exceed the first cache: all positions of a
// part with some outputs before the next outputs.
template <class T> void sums_of_group(const Sums<T>& s, const Runs& rows, const Runs& columns) {
    Steps steps;
    int taps_h = 1, taps_w = 1, longest = 0;
    for (const Run& y : rows) taps_h = std::max(taps_h, y.taps);
    for (const Run& x : columns) taps_w = std::max(taps_w, x.taps), longest = std::max(longest, x.count);
    const int64_t weights = int64_t(s.outputs) * s.inputs * taps_h * taps_w * sizeof(T);
    const int group = 2 * weights > FIRST_CACHE ? SUMS : s.outputs;
    const int64_t positions = SECOND_CACHE / (int64_t(s.inputs) * s.stride * sizeof(T));
    const int across = std::max<int64_t>(4, std::min<int64_t>(longest, positions / taps_h));
    const int height = std::max<int64_t>(1, positions / across - taps_h + 1);
    for (const Run& y : rows)
        for (int i = 0; i < y.count; i += height)
            for (const Run& x : columns) {
                steps_of(s, y, x, steps);
                for (int j = 0; j < x.count; j += across)
                    for (int o = 0; o < s.outputs; o += group)
                        rectangle(s, y.positions(i, height), x.positions(j, across), steps, o,
                                  std::min(o + group, s.outputs));
            }
}

// -- channel by channel -----------------------------------------------------------------------------------------------

constexpr int CHANNELS = 16;  // whose features stay in the second cache while the runs follow each other

template <int K> using Constant = std::integral_constant<int, K>;

// Calls f(y, x, KY, KX, first) for up to three taps of each of two runs at a time, whose numbers KY and KX are known to
// the compiler. f treats some channels, not one: rectangles have few vectors, and what the processor learned about the
// loops for one channel holds for the next ones.
template <class F> void by_taps(const Run& y, const Run& x, F f) {
    if (y.taps == 0 || x.taps == 0) return f(y, x, Constant<0>{}, Constant<0>{}, true);
    for (int i = 0; i < y.taps; i += 3)
        for (int j = 0; j < x.taps; j += 3) {
            const Run some_y = y.some_taps(i, 3), some_x = x.some_taps(j, 3);
            const auto row = [&](auto ky) {
                if (some_x.taps == 3) f(some_y, some_x, ky, Constant<3>{}, i + j == 0);
                else if (some_x.taps == 2) f(some_y, some_x, ky, Constant<2>{}, i + j == 0);
                else f(some_y, some_x, ky, Constant<1>{}, i + j == 0);
            };
            if (some_y.taps == 3) row(Constant<3>{});
            else if (some_y.taps == 2) row(Constant<2>{});
            else row(Constant<1>{});
        }
}

struct Strip {  // vectors of a row or a column, evenly spaced; the first one holds the lanes from `lane` on
    int64_t from, to, from_next, to_next;
    int count, lane;
};

// Of the positions of two runs: along the longer side.
template <class Body>
inline void each_strip(const Run& y, const Run& x, const Distances& from, const Distances& to, int vector, int stride,
                       Body body) {
    int64_t from_next = x.source_step * from.column, to_next = x.step * to.column;
    int64_t from_step = y.source_step * from.row, to_step = y.step * to.row;
    int count = x.count, strips = y.count, lanes = stride;
    if (from_next == stride && to_next == stride)  // one row of vectors
        from_next = to_next = lanes = vector, count *= stride / vector;
    if (count < y.count)
        count = y.count, strips = x.count, lanes = stride, from_next = from_step, to_next = to_step,
        from_step = x.source_step * from.column, to_step = x.step * to.column;
    for (int i = 0; i < strips; ++i)
        for (int lane = 0; lane < lanes; lane += vector)
            body(Strip{y.source * from.row + x.source * from.column + i * from_step + lane,
                       y.first * to.row + x.first * to.column + i * to_step + lane, from_next, to_next, count, lane});
}

template <class T>
__attribute__((noinline)) void clear_padding(T* to, const Strip& strip, int lanes, int stride) {
    for (int k = 0; k < strip.count; ++k, to += strip.to_next) {
        const int lane = strip.to_next == width<T>() ? k * width<T>() % stride : strip.lane;
        if (lane + width<T>() > lanes) store<T>(to, keep_lanes<T>(load(to), lanes - lane));
    }
}

// One input per output.
template <class T> void channelwise(const Sums<T>& s, const Runs& rows, const Runs& columns, int first, int last) {
    const auto rectangle = [&](const Run& y, const Run& x, auto ky, auto kx, bool initial) {
        constexpr int KY = decltype(ky)::value, KX = decltype(kx)::value;
        const int64_t dy = y.tap_source * s.from.row, dx = x.tap_source * s.from.column;
        for (int o = first; o < last; ++o) {
            const T* w = s.weight + o * s.weight_output + y.tap * s.weight_row + x.tap;
            wide<T> factor[KY + 1][KX + 1];
            ESPER_UNROLLED(i, KY) ESPER_UNROLLED(j, KX)
                factor[i][j] = wide<T>{} + w[i * y.tap_step * s.weight_row + j * x.tap_step];
            const T bias = s.bias ? s.bias[o] : T(0);
            each_strip(y, x, s.from, s.to, width<T>(), s.stride, [&](const Strip strip) {
                const T* h = s.in + o / s.outputs * s.from.channel + strip.from;
                T *begin = s.out + o * s.to.channel + strip.to, *to = begin;
                for (int k = 0; k < strip.count; ++k, h += strip.from_next, to += strip.to_next) {
                    wide<T> sum = initial ? wide<T>{} + bias : load(to);
                    ESPER_UNROLLED(i, KY) ESPER_UNROLLED(j, KX) sum += factor[i][j] * load(h + i * dy + j * dx);
                    store<T>(to, sum);
                }
                if (s.lanes < s.stride) clear_padding(begin, strip, s.lanes, s.stride);
            });
        }
    };
    for (const Run& y : rows)
        for (const Run& x : columns) by_taps(y, x, rectangle);
}

// `weights` numbers of each group.
template <class T> void sums(Sums<T> s, const Runs& rows, const Runs& columns, int groups, int64_t weights) {
    if (s.inputs == 1 && s.outputs < 4) {
        for (int o = 0, all = groups * s.outputs; o < all; o += CHANNELS)
            channelwise(s, rows, columns, o, std::min(o + CHANNELS, all));
        return;
    }
    for (int g = 0; g < groups; ++g) {
        sums_of_group(s, rows, columns);
        s.in += s.inputs * s.from.channel, s.out += s.outputs * s.to.channel, s.weight += weights;
        if (s.bias) s.bias += s.outputs;
    }
}

template <class T>
void convolve(const Shape& s, const T* in, const T* weight, const T* bias, T* out, int lanes, int stride, T*) {
    const int inputs = s.inputs / s.groups, outputs = s.outputs / s.groups;
    const int64_t weights = int64_t(inputs) * s.taps();
    sums<T>({in, weight, bias, out, inputs, outputs, image(s.height, s.width, stride),
             image(s.out_height, s.out_width, stride), weights, s.taps(), s.kernel_w, lanes, stride},
            rows_of(s), columns_of(s), s.groups, outputs * weights);
}

template <class T>
void convolve_input_grad(const Shape& s, const T* grad_out, const T* weight, T* grad_in, int lanes, int stride, T*) {
    const int inputs = s.inputs / s.groups, outputs = s.outputs / s.groups;
    const int64_t weights = int64_t(inputs) * s.taps();
    sums<T>({grad_out, weight, nullptr, grad_in, outputs, inputs, image(s.out_height, s.out_width, stride),
             image(s.height, s.width, stride), s.taps(), weights, s.kernel_w, lanes, stride},
            rows_of(s, true), columns_of(s, true), s.groups, outputs * weights);
}

template <class T>
void multiply(const Product& p, const T* in, const T* weight, const T* bias, T* out, int lanes, int stride, T*) {
    sums_of_group<T>({in, weight, bias, out, p.inputs, p.outputs, sequence(p.inputs, stride),
                      sequence(p.outputs, stride), p.inputs, 1, 0, lanes, stride},
                     positions_of(p.positions), positions_of(1));
}

template <class T>
void multiply_input_grad(const Product& p, const T* grad_out, const T* weight, T* grad_in, int lanes, int stride, T*) {
    sums_of_group<T>({grad_out, weight, nullptr, grad_in, p.outputs, p.inputs, sequence(p.outputs, stride),
                      sequence(p.inputs, stride), 1, p.inputs, 0, lanes, stride},
                     positions_of(p.positions), positions_of(1));
}

// -- gradients of weights ---------------------------------------------------------------------------------------------

template <class T> using Lanes = std::make_integer_sequence<int, width<T>()>;

// Number from(i) of both vectors goes to lane i.
template <class T, class From, int... I>
inline wide<T> shuffled(wide<T> a, wide<T> b, From from, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, from(I)...);
#else
    return __builtin_shuffle(a, b, decltype(a < b){from(I)...});
#endif
}

// Every two neighbours, of both vectors.
template <class T> inline wide<T> pairs(wide<T> a, wide<T> b) {
    return shuffled<T>(a, b, [](int i) { return 2 * i; }, Lanes<T>{}) +
           shuffled<T>(a, b, [](int i) { return 2 * i + 1; }, Lanes<T>{});
}

// Totals of N vectors: pairs are added until the vectors are through, so that many totals cost few shuffles.
template <class T, int HALF = width<T>() / 2> inline void add_pairs(wide<T>* part) {
    ESPER_UNROLLED(i, HALF) part[i] = pairs<T>(part[2 * i], part[2 * i + 1]);
    if constexpr (HALF > 1) add_pairs<T, HALF / 2>(part);
}
template <class T, int N> inline void totals(const wide<T>* sum, T* to) {
    constexpr int W = width<T>();
    ESPER_UNROLLED(group, (N + W - 1) / W) {
        wide<T> part[W];
        ESPER_UNROLLED(i, W) part[i] = group * W + i < N ? sum[group * W + i] : wide<T>{};
        add_pairs<T>(part);
        store<T>(to + group * W, part[0]);
    }
}

template <class T> struct WeightGrad {  // of one group
    const T *in, *grad_out;
    T* grad;
    int inputs, outputs;
    Distances from, to;
    int stride;
};

struct Span {  // of positions
    int first, last;
};

// Positions of the span whose source, `shift` from their place, is inside.
inline Span inside(Span all, int step, int shift, int size) {
    while (all.first < all.last && all.first * step + shift < 0) ++all.first;
    while (all.first < all.last && (all.last - 1) * step + shift >= size) --all.last;
    return all;
}

// Where the products of one tap are in a part of the image.
struct Walk {
    int tap, rows, lanes, count;  // vectors follow each other over `lanes`, and `count` of them in a row
    int64_t g, h, g_row, h_row, g_next, h_next;
};

template <class T> std::vector<Walk> walks_of(const Shape& s, const WeightGrad<T>& k, Span all_y, Span all_x) {
    std::vector<Walk> walks;
    for (int tap = 0; tap < s.taps(); ++tap) {
        const int up = tap / s.kernel_w * s.dilation_h - s.pad_top, left = tap % s.kernel_w * s.dilation_w - s.pad_left;
        const Span y = inside(all_y, s.stride_h, up, s.height), x = inside(all_x, s.stride_w, left, s.width);
        if (y.first == y.last || x.first == x.last) continue;
        Walk walk{tap, y.last - y.first, k.stride, x.last - x.first,
                  y.first * k.to.row + x.first * k.to.column,
                  (y.first * s.stride_h + up) * k.from.row + (x.first * s.stride_w + left) * k.from.column,
                  k.to.row, s.stride_h * k.from.row, k.to.column, s.stride_w * k.from.column};
        if (s.stride_w == 1)  // one row of vectors
            walk.count *= k.stride / width<T>(), walk.g_next = walk.h_next = walk.lanes = width<T>();
        walks.push_back(walk);
    }
    return walks;
}

// Products of OS outputs and CS inputs for one tap.
template <class T, int OS, int CS> void tile(const WeightGrad<T>& k, const Walk& walk, int o, int c, int taps) {
    wide<T> sum[OS][CS];
    ESPER_UNROLLED(i, OS) ESPER_UNROLLED(j, CS) sum[i][j] = wide<T>{};
    const int64_t g_jump = walk.g_row - (walk.count - 1) * walk.g_next;  // to the next row of the image
    const int64_t h_jump = walk.h_row - (walk.count - 1) * walk.h_next;
    for (int lane = 0; lane < walk.lanes; lane += width<T>()) {
        const T *g = k.grad_out + o * k.to.channel + walk.g + lane, *h = k.in + c * k.from.channel + walk.h + lane;
        for (int n = walk.rows * walk.count, left = walk.count; n > 0; --n) {  // rows are too short for own loops
            wide<T> here[CS];
            ESPER_UNROLLED(j, CS) here[j] = load(h + j * k.from.channel);
            ESPER_UNROLLED(i, OS) {
                const wide<T> to = load(g + i * k.to.channel);
                ESPER_UNROLLED(j, CS) sum[i][j] += to * here[j];
            }
            --left;
            g += left ? walk.g_next : g_jump, h += left ? walk.h_next : h_jump;
            left = left ? left : walk.count;
        }
    }
    T total[OS * CS + width<T>()];
    totals<T, OS * CS>(&sum[0][0], total);
    T* grad = k.grad + (int64_t(o) * k.inputs + c) * taps + walk.tap;
    ESPER_UNROLLED(i, OS) ESPER_UNROLLED(j, CS) grad[(int64_t(i) * k.inputs + j) * taps] += total[i * CS + j];
}

template <class T, int OS> void tiles(const WeightGrad<T>& k, const std::vector<Walk>& walks, int o, int taps) {
    constexpr int MOST = REGISTERS == 32 ? 4 : 3;
    for (int c = 0, done; c < k.inputs; c += done) {
        done = std::min(MOST, k.inputs - c);
        for (const Walk& walk : walks)
            if (done == MOST) tile<T, OS, MOST>(k, walk, o, c, taps);
            else if (done == 3) tile<T, OS, 3>(k, walk, o, c, taps);
            else if (done == 2) tile<T, OS, 2>(k, walk, o, c, taps);
            else tile<T, OS, 1>(k, walk, o, c, taps);
    }
}

// Parts of the image of which the features of a tile stay in the first cache.
template <class T> void tiled_weight_grad(const Shape& s, const WeightGrad<T>& k) {
    const int64_t positions = FIRST_CACHE / (8 * int64_t(k.stride) * sizeof(T));
    const int columns = std::max<int64_t>(2, std::min<int64_t>(positions, s.out_width));
    const int rows = std::max<int64_t>(1, positions / columns);
    for (int top = 0; top < s.out_height; top += rows)
        for (int left = 0; left < s.out_width; left += columns) {
            const auto walks = walks_of(s, k, {top, std::min(top + rows, s.out_height)},
                                        {left, std::min(left + columns, s.out_width)});
            for (int o = 0, done; o < k.outputs; o += done) {
                done = k.outputs - o >= 4 ? 4 : k.outputs - o >= 2 ? 2 : 1;
                if (done == 4) tiles<T, 4>(k, walks, o, s.taps());
                else if (done == 2) tiles<T, 2>(k, walks, o, s.taps());
                else tiles<T, 1>(k, walks, o, s.taps());
            }
        }
}

// Rows and columns of a square of numbers trade places.
template <class T, int STEP = 1> inline void transpose_square(wide<T>* row) {
    if constexpr (STEP < width<T>()) {
        for (int i = 0; i < width<T>(); ++i)
            if (!(i & STEP)) {
                const wide<T> a = row[i], b = row[i + STEP];
                const auto low = [](int k) { return k & STEP ? width<T>() + k - STEP : k; };
                row[i] = shuffled<T>(a, b, low, Lanes<T>{});
                row[i + STEP] = shuffled<T>(a, b, [](int k) { return (k & STEP ? width<T>() : STEP) + k; }, Lanes<T>{});
            }
        transpose_square<T, STEP * 2>(row);
    }
}

constexpr int PANEL = 2048, PANEL_ROW = 48;  // examples of positions, and numbers of each, in a panel

// Lanes at a time; 0 for an image that is too wide.
template <class T> inline int panel_lanes(const Shape& s) {
    return PANEL / (std::min(s.reach(), s.height) * s.width) / width<T>() * width<T>();
}

inline int64_t panel_scratch(const Shape& s) {
    return PANEL * PANEL_ROW + int64_t(s.taps()) * (s.outputs / s.groups) * (s.inputs / s.groups);
}

// For many inputs: vectors along the inputs, so that nothing is summed over the lanes of a vector. The sums are those
// of `block`, with examples in the place of inputs. The inputs of some rows of the image and some lanes are transposed
// to a panel [position][lane][up to three vectors of inputs].
template <class T> void panel_weight_grad(const Shape& s, const WeightGrad<T>& k, int lanes, T* scratch) {
    constexpr int W = width<T>();
    const int vectors = (k.inputs + W - 1) / W, panels = (vectors + 2) / 3;
    const int most = std::min(lanes, panel_lanes<T>(s)), examples = s.width * ((most + W - 1) / W * W);
    // a panel that is read once for some outputs stays in the first cache
    const int rows = std::max(1, ((s.taps() == 1 ? 256 : PANEL) / examples - s.reach()) / s.stride_h + 1);
    const int64_t tap_size = int64_t(k.outputs) * k.inputs;
    T *panel = scratch, *sum = s.taps() == 1 ? k.grad : scratch + PANEL * PANEL_ROW;  // sum: [tap][output][input]
    if (sum != k.grad) std::fill(sum, sum + s.taps() * tap_size, T(0));
    Steps steps;
    for (int begin = 0; begin < lanes; begin += most)
        for (int first = 0; first < s.out_height; first += rows) {
            const int count = std::min(most, lanes - begin), last = std::min(first + rows, s.out_height);
            const int top = std::max(0, first * s.stride_h - s.pad_top);
            const int bottom = std::min(s.height, (last - 1) * s.stride_h - s.pad_top + s.reach());
            for (int p = 0, c = 0, size; p < panels; ++p, c += size * W) {
                size = vectors / panels + (p < vectors % panels);
                const int64_t next = size * W;
                for (int place = 0; place < (bottom - top) * s.width; ++place)
                    for (int u = c; u < c + next; u += W)
                        for (int lane = 0; lane < count; lane += W) {
                            const T* h = k.in + u * k.from.channel + (top + place / s.width) * k.from.row +
                                         place % s.width * k.from.column + begin + lane;
                            T* to = panel + (int64_t(place) * count + lane) * next + u - c;
                            wide<T> row[W];
                            ESPER_UNROLLED(i, W) row[i] = u + i < k.inputs ? load(h + i * k.from.channel) : wide<T>{};
                            transpose_square<T>(row);
                            ESPER_UNROLLED(i, W) if (lane + i < count) store<T>(to + i * next, row[i]);
                        }
                Spot spots[3];
                for (int u = 0; u < size; ++u) spots[u] = {u * W, c + u * W, k.inputs - c - u * W};
                for (int tap = 0; tap < s.taps(); ++tap) {
                    const int up = tap / s.kernel_w * s.dilation_h - s.pad_top;
                    const int left = tap % s.kernel_w * s.dilation_w - s.pad_left;
                    const Span y = inside({first, last}, s.stride_h, up, s.height);
                    const Span x = inside({0, s.out_width}, s.stride_w, left, s.width);
                    const int64_t across = x.last - x.first;
                    if (y.first == y.last || across == 0) continue;
                    steps.assign(across * count, {next, 1});
                    for (size_t i = count - 1; i < steps.size(); i += count)  // to the next position
                        steps[i] = {next * ((s.stride_w - 1) * count + 1), k.to.column - (count - 1)};
                    steps.back().from += next * count * (int64_t(s.stride_h) * s.width - across * s.stride_w);
                    steps.back().weight += k.to.row - across * k.to.column;
                    const T* g = k.grad_out + y.first * k.to.row + x.first * k.to.column + begin;
                    const int from = (y.first * s.stride_h + up - top) * s.width + x.first * s.stride_w + left;
                    const Sums<T> of_tap{panel + from * count * next, g, nullptr, sum + tap * tap_size,
                                         y.last - y.first, k.outputs, {}, {k.inputs, 0, 0}, k.to.channel, 0, 0, 0, 0,
                                         true};
                    blocks(of_tap, steps, spots, size, g, 0, k.outputs);
                }
            }
        }
    for (int64_t i = 0; sum != k.grad && i < tap_size; ++i)
        for (int tap = 0; tap < s.taps(); ++tap) k.grad[i * s.taps() + tap] += sum[tap * tap_size + i];
}

// One input per output. `sums` [channel][tap][vector].
template <class T> void channelwise_weight_grad(const Shape& s, const WeightGrad<T>& k, T* sums) {
    constexpr int W = width<T>();
    const Runs rows = rows_of(s), columns = columns_of(s);
    for (int first = 0; first < s.outputs; first += CHANNELS) {
        const int last = std::min(first + CHANNELS, s.outputs), count = (last - first) * s.taps();
        std::fill(sums, sums + (count + W - 1) / W * W * W, T(0));
        const auto rectangle = [&](const Run& y, const Run& x, auto ky, auto kx, bool) {
            constexpr int KY = decltype(ky)::value, KX = decltype(kx)::value;
            const int64_t dy = y.tap_source * k.from.row, dx = x.tap_source * k.from.column;
            for (int o = first; o < last; ++o) {
                wide<T> sum[KY + 1][KX + 1];
                ESPER_UNROLLED(i, KY) ESPER_UNROLLED(j, KX) sum[i][j] = wide<T>{};
                each_strip(y, x, k.from, k.to, W, k.stride, [&](const Strip& strip) {
                    const T *h = k.in + o / k.outputs * k.from.channel + strip.from;
                    const T *g = k.grad_out + o * k.to.channel + strip.to;
                    for (int n = 0; n < strip.count; ++n, h += strip.from_next, g += strip.to_next) {
                        const wide<T> to = load(g);
                        ESPER_UNROLLED(i, KY) ESPER_UNROLLED(j, KX) sum[i][j] += to * load(h + i * dy + j * dx);
                    }
                });
                T* own = sums + ((o - first) * s.taps() + y.tap * s.kernel_w + x.tap) * W;
                ESPER_UNROLLED(i, KY) ESPER_UNROLLED(j, KX) {
                    T* to = own + (i * y.tap_step * s.kernel_w + j * x.tap_step) * W;
                    store<T>(to, load(to) + sum[i][j]);
                }
            }
        };
        for (const Run& y : rows)
            for (const Run& x : columns) by_taps(y, x, rectangle);
        for (int i = 0; i < count; i += W) {
            wide<T> part[W];
            T total[W];
            ESPER_UNROLLED(j, W) part[j] = load(sums + (i + j) * W);
            totals<T, W>(part, total);
            for (int j = 0; j < W && i + j < count; ++j) k.grad[first * s.taps() + i + j] += total[j];
        }
    }
}

// Rows of numbers that follow each other.
template <class T> void bias_grad(const WeightGrad<T>& k, int outputs, int rows, int length, T* grad) {
    for (int o = 0; o < outputs; ++o) {
        wide<T> sum[4] = {};
        for (int row = 0; row < rows; ++row) {
            const T* g = k.grad_out + o * k.to.channel + row * k.to.row;
            int at = 0;
            for (; at + 4 * width<T>() <= length; at += 4 * width<T>())
                ESPER_UNROLLED(v, 4) sum[v] += load(g + at + v * width<T>());
            for (; at < length; at += width<T>()) sum[0] += load(g + at);
        }
        grad[o] += total<T>((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}

inline int64_t convolution_scratch(const Shape& s) {
    return std::max(panel_scratch(s), 16 * (CHANNELS * int64_t(s.taps()) + 16));
}

template <class T>
void convolve_weight_grad(const Shape& s, const T* in, const T* grad_out, T* grad, T* grad_bias, int lanes, int stride,
                          T* scratch) {
    const int inputs = s.inputs / s.groups, outputs = s.outputs / s.groups;
    WeightGrad<T> k{in, grad_out, grad, inputs, outputs, image(s.height, s.width, stride),
                    image(s.out_height, s.out_width, stride), stride};
    if (grad_bias) bias_grad(k, s.outputs, s.out_height, s.out_width * stride, grad_bias);
    if (inputs == 1 && outputs < 4) return channelwise_weight_grad(s, k, scratch);
    // several vectors along the inputs that are nearly full
    const int full = (inputs + width<T>() - 1) / width<T>() * width<T>();
    const bool panels = full > width<T>() && 4 * inputs >= 3 * full && panel_lanes<T>(s) > 0;
    for (int g = 0; g < s.groups; ++g) {
        if (panels) panel_weight_grad(s, k, lanes, scratch);
        else tiled_weight_grad(s, k);
        k.in += inputs * k.from.channel, k.grad_out += outputs * k.to.channel;
        k.grad += int64_t(outputs) * inputs * s.taps();
    }
}

// Positions are the rows of an image.
inline Shape image_of(const Product& p) {
    return {p.inputs, p.outputs, 1, p.positions, 1, p.positions, 1, 1, 1, 1, 1, 0, 0, 1, 1};
}

inline int64_t product_scratch(const Product& p) { return panel_scratch(image_of(p)); }

template <class T>
void multiply_weight_grad(const Product& p, const T* in, const T* grad_out, T* grad, T* grad_bias, int lanes,
                          int stride, T* scratch) {
    const WeightGrad<T> k{in, grad_out, grad, p.inputs, p.outputs, sequence(p.inputs, stride),
                          sequence(p.outputs, stride), stride};
    panel_weight_grad(image_of(p), k, lanes, scratch);
    if (grad_bias) bias_grad(k, p.outputs, p.positions, stride, grad_bias);
}

// -- instructions: n = {the numbers of Shape or Product} ----------------------------------------------------------------

inline Shape shape_of(const int32_t* n) {
    return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14]};
}
inline Product product_of(const int32_t* n) { return {n[0], n[1], n[2]}; }

template <class T> void run_CONVOLVE(const Call<T>& c) {
    convolve<T>(shape_of(c.n), c.p[0], c.p[1], c.p[2], c.p[3], c.chunk.lanes, c.chunk.stride, c.p[4]);
}
template <class T> void run_CONVOLVE_INPUT_GRAD(const Call<T>& c) {
    convolve_input_grad<T>(shape_of(c.n), c.p[0], c.p[1], c.p[2], c.chunk.lanes, c.chunk.stride, c.p[3]);
}
template <class T> void run_CONVOLVE_WEIGHT_GRAD(const Call<T>& c) {
    convolve_weight_grad<T>(shape_of(c.n), c.p[0], c.p[1], c.p[2], c.p[3], c.chunk.lanes, c.chunk.stride, c.p[4]);
}
template <class T> void run_MULTIPLY(const Call<T>& c) {
    multiply<T>(product_of(c.n), c.p[0], c.p[1], c.p[2], c.p[3], c.chunk.lanes, c.chunk.stride, c.p[4]);
}
template <class T> void run_MULTIPLY_INPUT_GRAD(const Call<T>& c) {
    multiply_input_grad<T>(product_of(c.n), c.p[0], c.p[1], c.p[2], c.chunk.lanes, c.chunk.stride, c.p[3]);
}
template <class T> void run_MULTIPLY_WEIGHT_GRAD(const Call<T>& c) {
    multiply_weight_grad<T>(product_of(c.n), c.p[0], c.p[1], c.p[2], c.p[3], c.chunk.lanes, c.chunk.stride, c.p[4]);
}

}  // namespace esper
