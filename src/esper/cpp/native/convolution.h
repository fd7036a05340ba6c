// Convolutions and linear layers on rows of lanes, forward and backward: any kernel, stride, padding, dilation, groups.
//
//     convolution     in [C][H][W][lanes]     weight [O][C / groups][kh][kw]     out [O][H'][W'][lanes]
//     linear layer    in [H][C][lanes]        weight [O][C]                      out [H][O][lanes]
//
// At each position only the taps inside the image are computed, so no product is with padding.

#pragma once

#include <algorithm>
#include <vector>

#include "lanes.h"

// X(name, operands): see program.cpp.
#define ESPER_CONVOLUTIONS(X)                                                                                          \
    X(CONVOLVE, "xxxx") X(CONVOLVE_INPUT_GRAD, "xxx") X(CONVOLVE_WEIGHT_GRAD, "xxxx")

// Few steps over vectors: unrolled, so that arrays of vectors stay in registers.
#define ESPER_UNROLLED(i, count) _Pragma("GCC unroll 32") for (int i = 0; i < count; ++i)

namespace esper {

constexpr int SUMS = REGISTERS / 4;                            // outputs whose sums are computed at once
constexpr int64_t FIRST_CACHE = 32768, SECOND_CACHE = 524288;  // bytes that every processor has

// Of a convolution; pairs are of height and width. What is padded behind the image follows from the size of `out`.
struct Shape {
    int inputs, outputs, groups, in[2], out[2], kernel[2], stride[2], pad[2], dilation[2];
    int taps() const { return kernel[0] * kernel[1]; }
    // Where tap k of an axis is, from the place of its position on.
    int shift(int axis, int k) const { return k * dilation[axis] - pad[axis]; }
    // Whether each position reads one of the image.
    bool by_position() const {
        const auto inside = [&](int d) { return pad[d] == 0 && (out[d] - 1) * stride[d] < in[d]; };
        return taps() == 1 && inside(0) && inside(1);
    }
};

// -- which taps a position has ----------------------------------------------------------------------------------------

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

// One axis of the image: at output x, tap k reads input (x * up + shift + k * tap) / down, if that is whole and inside.
// The gradient of the input is a convolution of this kind, too.
inline Runs runs_of(const Shape& s, int d, bool grad) {
    const int outputs = grad ? s.in[d] : s.out[d], inputs = grad ? s.out[d] : s.in[d];
    const int up = grad ? 1 : s.stride[d], down = grad ? s.stride[d] : 1, sign = grad ? -1 : 1;
    Runs runs;
    for (int phase = 0; phase < std::min(down, outputs); ++phase) {
        Run all{phase, down, 0, 0, up, 0, 1, 0, 0};  // with every tap that reads whole positions
        for (int k = 0; k < s.kernel[d]; ++k) {
            const int source = phase * up + sign * s.shift(d, k);
            if (source % down) continue;
            if (all.taps == 0) all.tap = k, all.source = source / down;
            if (all.taps == 1) all.tap_step = k - all.tap, all.tap_source = source / down - all.source;
            ++all.taps;
        }
        int low_before = -1, high_before = -1;
        for (; all.first < outputs; all.first += down, all.source += up) {
            const auto outside = [&](int i) {
                const int source = all.source + i * all.tap_source;
                return source < 0 || source >= inputs;
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

struct Distances {  // in numbers, between neighbours in the features
    int64_t channel, row, column;
};

// -- sums over inputs and taps ----------------------------------------------------------------------------------------

// out[o] = bias[o] + sum of weight[o][c][tap] * in[c], each at the place of the tap. Vectors are along the lanes, so
// each weight is broadcast from where it is.
template <class T> struct Sums {
    const T *in, *weight, *bias;
    T* out;
    int inputs, outputs;
    Distances from, to;
    int64_t weight_output, weight_input, weight_row;
    int stride;
    bool add = false;  // to what `out` holds
};

// Not inline: few vectors need it, and it would keep the sums of `block` from staying in registers.
template <class T> __attribute__((noinline)) void add_some(T* to, wide<T> value, int count) {
    for (int i = 0; i < std::min(count, width<T>()); ++i) to[i] += value[i];
}

struct Spot {  // one vector: where its sources begin, where it goes, how many numbers are added where `out` ends
    int64_t from, to;
    int count = BYTES;
};

struct Step {  // from one tap to the next, in the input and in the weights
    int64_t from, weight;
};
using Steps = std::vector<Step>;

// From each tap of two runs to the next one, and from the last tap to the first one of the next input.
template <class T> void steps_of(const Sums<T>& s, const Run& y, const Run& x, Steps& steps) {
    const Step right{x.tap_source * s.from.column, x.tap_step}, row{y.tap_source * s.from.row, y.tap_step * s.weight_row};
    const Step down{row.from - (x.taps - 1) * right.from, row.weight - (x.taps - 1) * right.weight};
    steps.assign(x.taps * y.taps, right);
    for (int k = x.taps; k < x.taps * y.taps; k += x.taps) steps[k - 1] = down;
    if (steps.empty()) return;
    steps.back() = {s.from.channel + down.from - y.taps * row.from, s.weight_input + down.weight - y.taps * row.weight};
}

// One loop over inputs and taps: nested ones are too short for the processor to foresee their ends.
template <int OS, int VS, class T>
void block(const Sums<T>& s, const Steps& steps, const Spot* spots, const T* weight, int o) {
    wide<T> sum[OS][VS];
    ESPER_UNROLLED(i, OS) ESPER_UNROLLED(v, VS) sum[i][v] = wide<T>{} + (s.bias ? s.bias[o + i] : T(0));
    const int64_t next = s.weight_output;
    const T *h = s.in + spots[0].from, *w[3];
    int64_t apart[VS];
    ESPER_UNROLLED(v, VS) apart[v] = spots[v].from - spots[0].from;
    ESPER_UNROLLED(i, 3) w[i] = weight + (o + 3 * i) * next;  // of every third output, as few registers hold addresses
    const Step *step = steps.data(), *end = step + steps.size();
    for (int left = s.inputs * int(steps.size()); left > 0; --left) {
        wide<T> here[VS];
        ESPER_UNROLLED(v, VS) here[v] = load_once(h + apart[v]);
        ESPER_UNROLLED(i, OS) ESPER_UNROLLED(v, VS) sum[i][v] += w[i / 3][i % 3 * next] * here[v];
        h += step->from;
        ESPER_UNROLLED(i, 3) w[i] += step->weight;
        ++step;
        step = step == end ? steps.data() : step;
    }
    bool full = true;
    ESPER_UNROLLED(v, VS) full &= spots[v].count >= width<T>();
    ESPER_UNROLLED(i, OS) ESPER_UNROLLED(v, VS) {
        T* to = s.out + (o + i) * s.to.channel + spots[v].to;
        if (full) store<T>(to, s.add ? load(to) + sum[i][v] : sum[i][v]);
        else add_some<T>(to, sum[i][v], spots[v].count);
    }
}

// Outputs from `first` to `last`: as many sums at once as the registers hold.
template <class T>
void blocks(const Sums<T>& s, const Steps& steps, const Spot* spots, int count, const T* weight, int first, int last) {
    in_pieces<SUMS, SUMS / 2, 3, 2, 1>(last - first, [&](auto os, int o) {
        constexpr int OS = decltype(os)::value, VS = OS == SUMS ? 3 : SUMS == 8 ? 6 : 4;
        const auto some = [&](auto vs, int v) {
            block<OS, decltype(vs)::value>(s, steps, spots + v, weight, first + o);
        };
        if (VS == 3 && count == 4) in_pieces<2>(count, some);
        else in_pieces<VS, 2, 1>(count, some);
    });
}

// The same at the positions of two runs.
template <class T>
void rectangle(const Sums<T>& s, const Run& y, const Run& x, const Steps& steps, int first, int last) {
    constexpr int SPOTS = 6;  // for which all outputs follow each other, if the weights stay in the first cache
    const int per = s.stride / width<T>(), vectors = y.count * x.count * per;
    const int parts = (vectors + SPOTS - 1) / SPOTS, most = (vectors + parts - 1) / parts;
    const T* weight = s.weight + y.tap * s.weight_row + x.tap;
    const Spot right{x.source_step * s.from.column - s.stride, x.step * s.to.column - s.stride};
    const Spot down{y.source_step * s.from.row - x.count * x.source_step * s.from.column,
                    y.step * s.to.row - x.count * x.step * s.to.column};
    Spot spots[SPOTS], next{y.source * s.from.row + x.source * s.from.column,
                            y.first * s.to.row + x.first * s.to.column};
    for (int done = 0, vector = 0, column = 0, count; done < vectors; done += count) {
        count = std::min(most, vectors - done);
        for (int k = 0; k < count; ++k) {
            spots[k] = next;
            next.from += width<T>(), next.to += width<T>();
            if (++vector < per) continue;
            vector = 0, next.from += right.from, next.to += right.to;
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

// Calls f(y, x, KY, KX, first) for up to three taps of each of two runs at a time, whose numbers KY and KX are known to
// the compiler. f treats some channels, not one: rectangles have few vectors, and what the processor learned about the
// loops for one channel holds for the next ones.
template <class F> void by_taps(const Runs& rows, const Runs& columns, F f) {
    for (const Run& y : rows)
        for (const Run& x : columns) {
            if (y.taps == 0 || x.taps == 0) f(y, x, Constant<0>{}, Constant<0>{}, true);
            else in_pieces<3, 2, 1>(y.taps, [&](auto ky, int i) {
                in_pieces<3, 2, 1>(x.taps, [&](auto kx, int j) {
                    f(y.some_taps(i, 3), x.some_taps(j, 3), decltype(ky){}, kx, i + j == 0);
                });
            });
        }
}

// Calls f(from, to) for each vector at the positions of two runs.
template <class T, class F>
inline void each_vector(const Run& y, const Run& x, const Distances& from, const Distances& to, int stride, F f) {
    int64_t h_next = x.source_step * from.column, g_next = x.step * to.column;
    int count = x.count, lanes = stride;
    if (h_next == stride && g_next == stride)  // one row of vectors
        h_next = g_next = lanes = width<T>(), count *= stride / width<T>();
    for (int i = 0; i < y.count; ++i)
        for (int lane = 0; lane < lanes; lane += width<T>()) {
            int64_t h = (y.source + i * y.source_step) * from.row + x.source * from.column + lane;
            int64_t g = (y.first + i * y.step) * to.row + x.first * to.column + lane;
            for (int n = 0; n < count; ++n, h += h_next, g += g_next) f(h, g);
        }
}

// One input per output.
template <class T> void channelwise(const Sums<T>& s, const Runs& rows, const Runs& columns, int first, int last) {
    by_taps(rows, columns, [&](const Run& y, const Run& x, auto ky, auto kx, bool initial) {
        constexpr int KY = decltype(ky)::value, KX = decltype(kx)::value;
        const int64_t dy = y.tap_source * s.from.row, dx = x.tap_source * s.from.column;
        for (int o = first; o < last; ++o) {
            const T *in = s.in + o / s.outputs * s.from.channel, *w = s.weight + o * s.weight_output;
            T* out = s.out + o * s.to.channel;
            const wide<T> bias = wide<T>{} + (s.bias ? s.bias[o] : T(0));
            wide<T> factor[KY + 1][KX + 1];
            ESPER_UNROLLED(i, KY) ESPER_UNROLLED(j, KX)
                factor[i][j] = wide<T>{} + w[(y.tap + i * y.tap_step) * s.weight_row + x.tap + j * x.tap_step];
            each_vector<T>(y, x, s.from, s.to, s.stride, [&](int64_t h, int64_t g) {
                wide<T> sum = initial ? bias : load(out + g);
                ESPER_UNROLLED(i, KY) ESPER_UNROLLED(j, KX) sum += factor[i][j] * load(in + h + i * dy + j * dx);
                store<T>(out + g, sum);
            });
        }
    });
}

// A convolution, or the gradient of its input.
template <class T> void sums(const Call<T>& c, const Shape& shape, Sums<T> s, bool grad) {
    const Runs rows = runs_of(shape, 0, grad), columns = runs_of(shape, 1, grad);
    const int *size = grad ? shape.in : shape.out, outputs = s.outputs * shape.groups, lanes = c.chunk.lanes;
    const int64_t vectors = int64_t(outputs) * size[0] * size[1], stride = s.stride;
    T* out = s.out;
    const bool by_channel = s.inputs == 1 && s.outputs < 4;
    for (int o = 0; by_channel && o < outputs; o += CHANNELS)
        channelwise(s, rows, columns, o, std::min(o + CHANNELS, outputs));
    for (int g = 0; !by_channel && g < shape.groups; ++g) {
        sums_of_group(s, rows, columns);
        s.in += s.inputs * s.from.channel, s.out += s.outputs * s.to.channel;
        s.weight += int64_t(s.inputs) * s.outputs * shape.taps();
        if (s.bias) s.bias += s.outputs;
    }
    for (int64_t r = 0; lanes < stride && r < vectors; ++r)
        std::fill(out + r * stride + lanes, out + (r + 1) * stride, T(0));
}

// -- gradients of weights ---------------------------------------------------------------------------------------------

template <class T> using Lanes = std::make_integer_sequence<int, width<T>()>;

// Numbers of these places in both vectors.
#if defined(__clang__)
#define ESPER_SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ESPER_SHUFFLED(a, b, ...) __builtin_shuffle(a, b, decltype(a < b){__VA_ARGS__})
#endif

// Two rows of a square of numbers trade those that are beside its diagonal.
template <class T, int STEP, int... I> inline void trade(wide<T>& a, wide<T>& b, std::integer_sequence<int, I...>) {
    const wide<T> first = a;
    a = ESPER_SHUFFLED(first, b, (I & STEP ? width<T>() + (I ^ STEP) : I)...);
    b = ESPER_SHUFFLED(first, b, (I & STEP ? width<T>() + I : I ^ STEP)...);
}

// Rows and columns of a square of numbers trade places.
template <class T, int STEP = 1> inline void transpose_square(wide<T>* row) {
    if constexpr (STEP < width<T>()) {
        for (int i = 0; i < width<T>(); ++i)
            if (!(i & STEP)) trade<T, STEP>(row[i], row[i + STEP], Lanes<T>{});
        transpose_square<T, STEP * 2>(row);
    }
}

// Totals of N vectors: pairs are added until the vectors are through, so that many totals cost few shuffles.
template <class T, int... I> inline wide<T> pairs(wide<T> a, wide<T> b, std::integer_sequence<int, I...>) {
    return ESPER_SHUFFLED(a, b, 2 * I...) + ESPER_SHUFFLED(a, b, (2 * I + 1)...);
}
template <class T, int HALF> inline void add_pairs(wide<T>* part) {
    ESPER_UNROLLED(i, HALF) part[i] = pairs<T>(part[2 * i], part[2 * i + 1], Lanes<T>{});
    if constexpr (HALF > 1) add_pairs<T, HALF / 2>(part);
}
template <class T, int N> inline void totals(const wide<T>* sum, T* to) {
    constexpr int W = width<T>();
    ESPER_UNROLLED(group, (N + W - 1) / W) {
        wide<T> part[W];
        ESPER_UNROLLED(i, W) part[i] = group * W + i < N ? sum[group * W + i] : wide<T>{};
        add_pairs<T, W / 2>(part);
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

// Where the products of one tap are in a part of the image.
struct Walk {
    int tap, rows, lanes, count;  // vectors follow each other over `lanes`, and `count` of them in a row
    int64_t g, h, g_row, h_row, g_next, h_next;
};

template <class T> std::vector<Walk> walks_of(const Shape& s, const WeightGrad<T>& k, Span all_y, Span all_x) {
    // positions whose source is inside
    const auto inside = [&](int d, Span all, int shift) {
        while (all.first < all.last && all.first * s.stride[d] + shift < 0) ++all.first;
        while (all.first < all.last && (all.last - 1) * s.stride[d] + shift >= s.in[d]) --all.last;
        return all;
    };
    std::vector<Walk> walks;
    for (int tap = 0; tap < s.taps(); ++tap) {
        const int up = s.shift(0, tap / s.kernel[1]), left = s.shift(1, tap % s.kernel[1]);
        const Span y = inside(0, all_y, up), x = inside(1, all_x, left);
        if (y.first == y.last || x.first == x.last) continue;
        Walk walk{tap, y.last - y.first, k.stride, x.last - x.first,
                  y.first * k.to.row + x.first * k.to.column,
                  (y.first * s.stride[0] + up) * k.from.row + (x.first * s.stride[1] + left) * k.from.column,
                  k.to.row, s.stride[0] * k.from.row, k.to.column, s.stride[1] * k.from.column};
        if (s.stride[1] == 1)  // one row of vectors
            walk.count *= k.stride / width<T>(), walk.g_next = walk.h_next = walk.lanes = width<T>();
        walks.push_back(walk);
    }
    return walks;
}

// Products of OS outputs and CS inputs for one tap.
template <int OS, int CS, class T> void tile(const WeightGrad<T>& k, const Walk& walk, int o, int c, int taps) {
    wide<T> sum[OS][CS];
    ESPER_UNROLLED(i, OS) ESPER_UNROLLED(j, CS) sum[i][j] = wide<T>{};
    const int64_t g_jump = walk.g_row - (walk.count - 1) * walk.g_next;  // to the next row of the image
    const int64_t h_jump = walk.h_row - (walk.count - 1) * walk.h_next;
    for (int lane = 0; lane < walk.lanes; lane += width<T>()) {
        const T *g = k.grad_out + o * k.to.channel + walk.g + lane, *h = k.in + c * k.from.channel + walk.h + lane;
        for (int n = walk.rows * walk.count, left = walk.count; n > 0; --n) {  // rows are too short for own loops
            wide<T> here[CS];
            ESPER_UNROLLED(j, CS) here[j] = load_once(h + j * k.from.channel);
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

// Parts of the image of which the features of a tile stay in the first cache.
template <class T> void tiled_weight_grad(const Shape& s, const WeightGrad<T>& k) {
    const int64_t positions = FIRST_CACHE / (8 * int64_t(k.stride) * sizeof(T));
    const int columns = std::max<int64_t>(2, std::min<int64_t>(positions, s.out[1]));
    const int rows = std::max<int64_t>(1, positions / columns);
    for (int top = 0; top < s.out[0]; top += rows)
        for (int left = 0; left < s.out[1]; left += columns) {
            const auto walks = walks_of(s, k, {top, std::min(top + rows, s.out[0])},
                                        {left, std::min(left + columns, s.out[1])});
            in_pieces<4, 2, 1>(k.outputs, [&](auto os, int o) {
                constexpr int OS = decltype(os)::value;
                in_pieces<REGISTERS == 32 ? 4 : 3, 3, 2, 1>(k.inputs, [&](auto cs, int c) {
                    for (const Walk& walk : walks) tile<OS, decltype(cs)::value>(k, walk, o, c, s.taps());
                });
            });
        }
}

// For many inputs and one tap: vectors along the inputs, so that nothing is summed over the lanes of a
// vector. The sums are those of `block`, with examples of positions in the place of inputs. Inputs are transposed to a
// panel [position][lane][up to three vectors of inputs], which stays in the first cache.
template <class T> void panel_weight_grad(const Shape& s, const WeightGrad<T>& k, int lanes) {
    constexpr int W = width<T>(), EXAMPLES = 256;
    const int vectors = (k.inputs + W - 1) / W, panels = (vectors + 2) / 3;
    const int positions = s.out[0] * s.out[1], most = std::min(lanes, EXAMPLES), at_once = EXAMPLES / ((most + W - 1) / W * W);
    alignas(64) T panel[EXAMPLES * 3 * W];
    Steps steps;
    for (int begin = 0; begin < lanes; begin += most)
        for (int first = 0; first < positions; first += at_once) {
            const int count = std::min(most, lanes - begin), last = std::min(first + at_once, positions);
            const T* g = k.grad_out + first * k.to.column + begin;
            for (int p = 0, c = 0, size; p < panels; ++p, c += size * W) {
                size = vectors / panels + (p < vectors % panels);
                const int64_t next = size * W;
                for (int place = first; place < last; ++place)
                    for (int u = c; u < c + next; u += W)
                        for (int lane = 0; lane < count; lane += W) {
                            const T* h = k.in + u * k.from.channel + place / s.out[1] * s.stride[0] * k.from.row +
                                         place % s.out[1] * s.stride[1] * k.from.column + begin + lane;
                            T* to = panel + (int64_t(place - first) * count + lane) * next + u - c;
                            wide<T> row[W];
                            ESPER_UNROLLED(i, W) row[i] = u + i < k.inputs ? load(h + i * k.from.channel) : wide<T>{};
                            transpose_square<T>(row);
                            ESPER_UNROLLED(i, W) if (lane + i < count) store<T>(to + i * next, row[i]);
                        }
                Spot spots[3];
                for (int u = 0; u < size; ++u) spots[u] = {u * W, c + u * W, k.inputs - c - u * W};
                steps.assign(count, {next, 1});
                steps.back().weight = k.to.column - (count - 1);  // to the next position
                const Sums<T> own{panel, g, nullptr, k.grad, last - first, k.outputs, {}, {k.inputs, 0, 0},
                                  k.to.channel, 0, 0, 0, true};
                blocks(own, steps, spots, size, g, 0, k.outputs);
            }
        }
}

// One input per output. `sums` [channel][tap][vector].
template <class T> void channelwise_weight_grad(const Shape& s, const WeightGrad<T>& k) {
    constexpr int W = width<T>();
    const Runs rows = runs_of(s, 0, false), columns = runs_of(s, 1, false);
    for (int first = 0; first < s.outputs * s.groups; first += CHANNELS) {
        const int last = std::min(first + CHANNELS, s.outputs * s.groups), count = (last - first) * s.taps();
        std::vector<wide<T>> sums((count + W - 1) / W * W);
        by_taps(rows, columns, [&](const Run& y, const Run& x, auto ky, auto kx, bool) {
            constexpr int KY = decltype(ky)::value, KX = decltype(kx)::value;
            const int64_t dy = y.tap_source * k.from.row, dx = x.tap_source * k.from.column;
            for (int o = first; o < last; ++o) {
                const T *in = k.in + o / k.outputs * k.from.channel, *grad_out = k.grad_out + o * k.to.channel;
                wide<T> sum[KY + 1][KX + 1];
                ESPER_UNROLLED(i, KY) ESPER_UNROLLED(j, KX) sum[i][j] = wide<T>{};
                each_vector<T>(y, x, k.from, k.to, k.stride, [&](int64_t h, int64_t g) {
                    const wide<T> to = load(grad_out + g);
                    ESPER_UNROLLED(i, KY) ESPER_UNROLLED(j, KX) sum[i][j] += to * load(in + h + i * dy + j * dx);
                });
                wide<T>* own = sums.data() + (o - first) * s.taps() + y.tap * s.kernel[1] + x.tap;
                ESPER_UNROLLED(i, KY) ESPER_UNROLLED(j, KX)
                    own[i * y.tap_step * s.kernel[1] + j * x.tap_step] += sum[i][j];
            }
        });
        for (int i = 0; i < count; i += W) {
            T total[W];
            totals<T, W>(sums.data() + i, total);
            for (int j = 0; j < W && i + j < count; ++j) k.grad[first * s.taps() + i + j] += total[j];
        }
    }
}

// Positions that follow each other.
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

// -- instructions: n = {the numbers of Shape}, flag: a linear layer ------------------------------------------------------

template <class T> struct Convolution : Shape {  // inputs and outputs are those of a group
    Distances from, to;
    explicit Convolution(const Call<T>& c) {
        std::memcpy(static_cast<Shape*>(this), c.n, sizeof(Shape));
        from = distances(c, inputs, in), to = distances(c, outputs, out);
        inputs /= groups, outputs /= groups;
    }
    static Distances distances(const Call<T>& c, int channels, const int* size) {
        const int64_t stride = c.chunk.stride, column = c.flag ? channels * stride : stride;
        return {c.flag ? stride : size[0] * size[1] * stride, size[1] * column, column};
    }
};

template <class T> void run_CONVOLVE(const Call<T>& c) {
    const Convolution<T> s(c);
    sums<T>(c, s, {c.p[0], c.p[1], c.p[2], c.p[3], s.inputs, s.outputs, s.from, s.to, int64_t(s.inputs) * s.taps(),
                   s.taps(), s.kernel[1], c.chunk.stride}, false);
}

template <class T> void run_CONVOLVE_INPUT_GRAD(const Call<T>& c) {
    const Convolution<T> s(c);
    sums<T>(c, s, {c.p[0], c.p[1], nullptr, c.p[2], s.outputs, s.inputs, s.to, s.from, s.taps(),
                   int64_t(s.inputs) * s.taps(), s.kernel[1], c.chunk.stride}, true);
}

template <class T> void run_CONVOLVE_WEIGHT_GRAD(const Call<T>& c) {
    const Convolution<T> s(c);
    WeightGrad<T> k{c.p[0], c.p[1], c.p[2], s.inputs, s.outputs, s.from, s.to, c.chunk.stride};
    const int outputs = s.outputs * s.groups, positions = s.out[0] * s.out[1];
    if (c.p[3]) bias_grad(k, outputs, c.flag ? positions : 1, (c.flag ? 1 : positions) * k.stride, c.p[3]);
    if (s.inputs == 1 && s.outputs < 4) return channelwise_weight_grad(s, k);
    // several vectors along the inputs that are nearly full
    const int full = (s.inputs + width<T>() - 1) / width<T>() * width<T>();
    const bool panels = s.by_position() && (c.flag || (full > width<T>() && 4 * s.inputs >= 3 * full));
    for (int g = 0; g < s.groups; ++g) {
        if (panels) panel_weight_grad(s, k, c.chunk.lanes);
        else tiled_weight_grad(s, k);
        k.in += s.inputs * s.from.channel, k.grad_out += s.outputs * s.to.channel;
        k.grad += int64_t(s.outputs) * s.inputs * s.taps();
    }
}

}  // namespace esper
