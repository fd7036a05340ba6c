// The loop that executes the programs of many hosts.
//
// tolaria/executors/native/program.py writes programs; it lists the same operations in the same order. An operand is a
// place in one of a host's spaces (its weights, their gradients, a batch, working memory), so hosts of equal structure
// share a program. A host passes over all its data before the next one begins, so that its weights stay in the
// processor's cache; a batch passes in chunks, so that their features stay there too. A host uses only its own spaces
// and those of the thread that runs it, so its results depend on no other host.

#include "convolution.h"
#include "layers.h"
#include "optimizers.h"

#include <algorithm>
#include <cctype>
#include <vector>

// X(name, operands): the size of each operand, as a letter of `bytes_of`; capital if it is a sum over the batch.
#define ESPER_OPERATIONS(X)                                                                                            \
    X(TRANSPOSE, "mp") X(CONVOLVE, "iwo") X(CONVOLVE_INPUT_GRAD, "owi") X(CONVOLVE_WEIGHT_GRAD, "ioW")                 \
    X(DEPTHWISE, "idi") X(DEPTHWISE_INPUT_GRAD, "idi") X(DEPTHWISE_WEIGHT_GRAD, "iiD") X(BATCH_NORM, "fccccCCf")       \
    X(BATCH_NORM_BACKWARD, "fccccCCf") X(BATCH_NORM_FIXED, "fccccf") X(GROUP_NORM, "fcccggf")                         \
    X(GROUP_NORM_BACKWARD, "fcccggfCCC") X(MAX_POOL, "pqq") X(MAX_POOL_BACKWARD, "qqp") X(MEAN, "fr")                   \
    X(MEAN_BACKWARD, "rf") X(ADD_BIAS, "cf") X(ADD_BIAS_BACKWARD, "fC") X(SCALE, "cff") X(SCALE_BACKWARD, "cffC")      \
    X(MODULATE, "frf") X(MODULATE_BACKWARD, "ffr") X(SHIFT, "nrrr") X(SHIFT_BACKWARD, "nrrrN") X(ACTIVATE, "rr")       \
    X(ACTIVATE_BACKWARD, "rr") X(BLEND, "rrbnr") X(BLEND_BACKWARD, "rrbnrrb") X(CROSS_ENTROPY, "rltr")                \
    X(SQUARE_NORM, "cn") X(CLIP, "n") X(SGD, "nncccc") X(ADAMW, "nncccccs")

namespace esper {

#define X(name, operands) name,
enum Operation : int32_t { ESPER_OPERATIONS(X) };
#undef X

#define X(name, operands) operands,
constexpr const char* OPERANDS_OF[] = {ESPER_OPERATIONS(X)};
#undef X

constexpr int SIZES = 6, NUMBERS_GIVEN = 5, OPERANDS = 10;

// Working memory: rows of lanes of each chunk, those that all chunks share, and single numbers. Then a batch, which
// `Pass` gathers.
enum Space : int32_t { NOTHING = -1, ROWS, LOCAL, NUMBERS, IMAGES, LABELS };

struct Instruction {
    int32_t operation;
    int32_t flag;  // ReLU afterwards, the kind of activation, whether a seed is active
    int32_t size[SIZES];
    double number[NUMBERS_GIVEN];  // epsilon, momentum; rates of an optimizer; label smoothing
    int32_t space[OPERANDS];
    int64_t offset[OPERANDS];  // rows in ROWS and LOCAL, elements elsewhere
};

// Layers of two halves: all chunks of a batch pass the first one before any passes the second one.
inline bool has_halves(const Instruction& i) {
    return i.operation == BATCH_NORM || i.operation == BATCH_NORM_BACKWARD;
}

// The optimizer's instructions, which need the gradients of the whole batch.
inline bool is_of_optimizer(const Instruction& i) { return i.operation >= SQUARE_NORM; }

template <class T> struct Host {
    const int64_t *base, *size;  // addresses of the spaces, and their bytes
    int64_t spaces;
    Chunk chunk;
    T* scratch;  // packed weights, or a few rows
    int64_t scratch_size;

    template <class U = T> U* at(const Instruction& i, int k) const {
        if (i.space[k] == NOTHING) return nullptr;
        const int64_t step = i.space[k] <= LOCAL ? chunk.stride : 1;
        return reinterpret_cast<U*>(base[i.space[k]]) + i.offset[k] * step;
    }

    // Bytes of an operand of this letter.
    int64_t bytes_of(const Instruction& i, char letter) const {
        const int64_t n0 = i.size[0], n1 = i.size[1], n2 = i.size[2], n3 = i.size[3];
        const int64_t taps = int64_t(i.size[4]) * i.size[4], number = sizeof(T), row = number * chunk.stride;
        switch (std::tolower(letter)) {
            case 'n': return number;                          // one number
            case 'c': return n0 * number;                     // one for each channel or weight
            case 'w': return n0 * n1 * taps * number;         // weights of a convolution
            case 'd': return n0 * taps * number;              // weights of a depthwise convolution
            case 'm': return n0 * n1 * n2 * chunk.lanes * number;  // images
            case 'b': return row;                             // a row of lanes
            case 'r': return n0 * row;                        // rows
            case 'g': return n2 * row;                        // a row for each group
            case 'f': return n0 * n1 * row;                   // channels of positions
            case 'i': return n0 * n2 * n3 * row;              // inputs of a convolution
            case 'o': return n1 * n2 * n3 * row;              // outputs of a convolution
            case 'p': return n0 * n1 * n2 * row;              // images, or input of pooling
            case 'q': return n0 * (n1 / 2) * (n2 / 2) * row;  // output of pooling
            case 'l': return int64_t(chunk.lanes) * 8;        // labels
            case 't': return 16;                              // totals
            default: return 8;                                // steps
        }
    }

    static Shape shape_of(const Instruction& i) { return {i.size[0], i.size[1], i.size[2], i.size[3], i.size[4]}; }

    int64_t scratch_bytes(const Instruction& i) const {
        if (i.operation == CROSS_ENTROPY) return int64_t(3) * chunk.stride * sizeof(T);
        if (i.operation == CONVOLVE) return packed_size(shape_of(i)) * sizeof(T);
        return i.operation == CONVOLVE_INPUT_GRAD ? packed_size(shape_of(i).transposed()) * sizeof(T) : 0;
    }

    // Whether the instruction exists and stays within the memory that it was given.
    bool fits(const Instruction& i) const {
        if (i.operation < 0 || i.operation > ADAMW || scratch_bytes(i) > scratch_size) return false;
        // squares that fill the image: no row is left out, and none lies beyond the last
        if (i.operation == TRANSPOSE && (i.size[3] < 1 || i.size[1] % i.size[3] || i.size[2] % i.size[3])) return false;
        const char* letters = OPERANDS_OF[i.operation];
        for (int k = 0; letters[k]; ++k) {
            if (i.space[k] == NOTHING) continue;
            if (i.space[k] < 0 || i.space[k] >= spaces || i.offset[k] < 0) return false;
            const int64_t unit = std::strchr("lts", letters[k]) ? 8 : sizeof(T), step = i.space[k] <= LOCAL ? chunk.stride : 1;
            if (i.offset[k] * unit * step + bytes_of(i, letters[k]) > size[i.space[k]]) return false;
        }
        return labels_fit(i);
    }

    // Clears what the chunks of a batch add to.
    void clear_sums(const Instruction& i) const {
        const char* letters = OPERANDS_OF[i.operation];
        for (int k = 0; letters[k]; ++k)
            if (std::isupper(letters[k]) && i.space[k] != NOTHING) std::memset(at(i, k), 0, bytes_of(i, letters[k]));
    }

    // Whether every label has a class, which depends on the batch.
    bool labels_fit(const Instruction& i) const {
        if (i.operation == CROSS_ENTROPY)
            for (int lane = 0; lane < chunk.lanes; ++lane)
                if (at<int64_t>(i, 1)[lane] >= i.size[0]) return false;
        return true;
    }

    void run(const Instruction& i, int half) const {
        if (chunk.first() && half & SUMS_OF_BATCH) clear_sums(i);
        const int32_t* n = i.size;
        const int lanes = chunk.lanes, stride = chunk.stride;
        const T number = T(i.number[0]);
        const Rates<T> rates{number, T(i.number[1]), T(i.number[2]), T(i.number[3]), T(i.number[4])};
        const Shape shape = shape_of(i);  // of the forward pass
        T* p[OPERANDS] = {};
        for (int k = 0; OPERANDS_OF[i.operation][k]; ++k) p[k] = at(i, k);
        const Affine<T> affine{p[1], p[2]};  // of the normalizations
        switch (i.operation) {
            case TRANSPOSE: return transpose<T>(n[0], n[1], n[2], n[3], p[0], p[1], lanes, stride);
            case CONVOLVE: return convolve<T>(shape, p[0], p[1], false, p[2], lanes, stride, scratch);
            case CONVOLVE_INPUT_GRAD:
                return convolve<T>(shape.transposed(), p[0], p[1], true, p[2], lanes, stride, scratch);
            case CONVOLVE_WEIGHT_GRAD: return convolve_weight_grad<T>(shape, p[0], p[1], p[2], stride);
            case DEPTHWISE: return depthwise<T>(shape, p[0], p[1], false, p[2], lanes, stride);
            case DEPTHWISE_INPUT_GRAD: return depthwise<T>(shape, p[0], p[1], true, p[2], lanes, stride);
            case DEPTHWISE_WEIGHT_GRAD: return depthwise_weight_grad<T>(shape, p[0], p[1], p[2], stride);
            case BATCH_NORM:
                return batch_norm<T>(half, n[0], n[1], number, T(i.number[1]), p[0], affine, p[3], p[4], p[5], p[6],
                                     p[7], chunk);
            case BATCH_NORM_BACKWARD:
                return batch_norm_backward<T>(half, n[0], n[1], p[0], affine, p[3], p[4], p[7], p[5], p[6], chunk);
            case BATCH_NORM_FIXED:
                return batch_norm_fixed<T>(n[0], n[1], number, p[0], affine, p[3], p[4], p[5], lanes, stride);
            case GROUP_NORM:
                return group_norm<T>(n[0], n[1], n[2], i.flag, number, p[0], affine, p[3], p[4], p[5], p[6], lanes,
                                     stride);
            case GROUP_NORM_BACKWARD:
                return group_norm_backward<T>(n[0], n[1], n[2], i.flag, p[0], affine, p[3], p[4], p[5], p[6], p[7],
                                              p[8], p[9], lanes, stride);
            case MAX_POOL: return max_pool<T>(n[0], n[1], n[2], p[0], p[1], p[2], lanes, stride);
            case MAX_POOL_BACKWARD: return max_pool_backward<T>(n[0], n[1], n[2], p[0], p[1], p[2], lanes, stride);
            case MEAN: return mean_space<T>(n[0], n[1], p[0], p[1], stride);
            case MEAN_BACKWARD: return mean_space_backward<T>(n[0], n[1], p[0], p[1], lanes, stride);
            case ADD_BIAS: return add_bias<T>(n[0], n[1], p[0], p[1], lanes, stride);
            case ADD_BIAS_BACKWARD: return add_bias_backward<T>(n[0], n[1], p[0], p[1], lanes, stride);
            case SCALE: return scale<T>(n[0], n[1], p[0], p[1], p[2], lanes, stride);
            case SCALE_BACKWARD: return scale_backward<T>(n[0], n[1], p[0], p[1], p[2], p[3], lanes, stride);
            case MODULATE: return modulate<T>(n[0], n[1], p[0], p[1], p[2], lanes, stride);
            case MODULATE_BACKWARD: return modulate_backward<T>(n[0], n[1], p[0], p[1], p[2], stride);
            case SHIFT: return shift<T>(n[0], p[0], p[1], p[2], p[3], lanes, stride);
            case SHIFT_BACKWARD: return shift_backward<T>(n[0], p[0], p[1], p[2], p[3], p[4], lanes, stride);
            case ACTIVATE: return activate<T>(n[0], i.flag, p[0], p[1], lanes, stride);
            case ACTIVATE_BACKWARD: return activate_backward<T>(n[0], i.flag, p[0], p[1], lanes, stride);
            case BLEND: return blend<T>(n[0], n[1], p[0], p[1], p[2], *p[3], p[4], lanes, stride);
            case BLEND_BACKWARD:
                return blend_backward<T>(n[0], n[1], i.flag, p[0], p[1], p[2], *p[3], p[4], p[5], p[6], lanes, stride);
            case CROSS_ENTROPY:
                return cross_entropy<T>(n[0], number, p[0], at<int64_t>(i, 1), at<double>(i, 2), p[3], scratch, chunk);
            case SQUARE_NORM: return square_norm<T>(n[0], p[0], i.flag, p[1]);
            case CLIP: *p[0] = clip_factor<T>(*p[0], number); return;
            case SGD: return sgd<T>(n[0], rates.times(*p[0]), *p[1], p[2], p[3], p[4], p[5]);
            case ADAMW:
                return adamw<T>(n[0], i.flag, rates.times(*p[0]), *p[1], p[2], p[3], p[4], p[5], p[6],
                                at<int64_t>(i, 7));
        }
    }
};

// The examples of a pass over the data. Each host takes them in its own order, or all take them as they lie.
struct Examples {
    const void* images;     // [available][numbers], null where the batch lies in the spaces of the hosts already
    const int64_t* labels;  // [available], or [hosts][count] with own_labels
    const int64_t* order;   // [hosts][count] places of examples, -1 after the last; null: 0 to count - 1
    const void* table;     // [channels][256] numbers; then images are bytes that stand for them. null: numbers
    const int64_t* moves;  // [hosts][count][3]: window down and right, and whether it is flipped. null: as they are
    int64_t available, numbers, count, batch;
    int64_t padded;  // fill a batch with examples of label -1 up to its stride, which is fastest
    int64_t channels, height, width, border;  // of an image; black pixels around it, for windows
    int64_t own_labels;
};

// The working memory of one thread, and their sizes in bytes.
struct Memory {
    void *rows, *local, *numbers, *scratch, *images;
    int64_t* labels;
    int64_t rows_size, local_size, numbers_size, scratch_size;
};

// The hosts, shared by all threads; `next` is the first position of `turn` that no thread has taken.
struct Hosts {
    const Instruction* program;
    const int64_t *first, *count;  // instructions of each host
    const int64_t* chunk;          // how many examples of a batch pass through its layers together
    const int64_t *base, *size;    // [hosts][spaces] addresses, bytes
    const int64_t* turn;           // hosts in the order in which they are run
    int64_t* next;
    int64_t hosts, spaces;
};

constexpr int64_t DONE = -1, NO_SUCH_EXAMPLE = -2;
constexpr int LANES = 16;

template <class T> class Pass {
  public:
    Pass(const Hosts& hosts, const Examples& examples, const Memory& memory)
        : hosts_(hosts), examples_(examples), memory_(memory), base_(hosts.spaces), size_(hosts.spaces) {}

    // Runs hosts until none is left. Returns DONE, or what went wrong: the number of an instruction that does not fit.
    int64_t run() {
        for (int64_t turn; (turn = __atomic_fetch_add(hosts_.next, 1, __ATOMIC_RELAXED)) < hosts_.hosts;)
            if (const int64_t failed = run_host(hosts_.turn[turn]); failed != DONE) return failed;
        return DONE;
    }

  private:
    int64_t run_host(int64_t h) {
        for (int64_t k = 0; k < hosts_.spaces; ++k) {
            base_[k] = hosts_.base[h * hosts_.spaces + k];
            size_[k] = hosts_.size[h * hosts_.spaces + k];
        }
        give(NUMBERS, memory_.numbers, memory_.numbers_size);
        lanes_ = -1;
        if (!examples_.images) return run_batch(h, static_cast<int>(examples_.batch), true);
        for (int64_t start = 0; start < examples_.count; start += examples_.batch) {
            const int found = left(h, start);
            if (!found) break;
            const int lanes = examples_.padded ? stride_of(found) : found;
            if (!gather(h, start, found, lanes)) return NO_SUCH_EXAMPLE;
            // the first batch is the largest: what fits it fits the others
            if (const int64_t failed = run_batch(h, lanes, start == 0); failed != DONE) return failed;
        }
        return DONE;
    }

    // Each chunk of a batch passes all layers up to the next one that needs a sum over the batch, then the next chunk.
    int64_t run_batch(int64_t h, int lanes, bool check) {
        const int size = examples_.images ? static_cast<int>(std::min<int64_t>(hosts_.chunk[h], lanes)) : lanes;
        if (lanes != lanes_) clear_last(lanes, size);
        lanes_ = lanes;
        const int64_t first = hosts_.first[h], last = first + hosts_.count[h];
        for (int64_t begin = first, end; begin <= last; begin = end + 1) {
            for (end = begin; end < last && (lanes <= size || !has_halves(hosts_.program[end]));) ++end;
            for (int before = 0; before < lanes; before += size) {
                const Host<T> host = of_chunk(std::min(size, lanes - before), before, lanes);
                if (begin > first) host.run(hosts_.program[begin - 1], FEATURES);
                for (int64_t i = begin; i < std::min(end + 1, last); ++i) {
                    const Instruction& next = hosts_.program[i];
                    if (is_of_optimizer(next) && !host.chunk.last()) continue;
                    if (!(check && host.chunk.first() ? host.fits(next) : host.labels_fit(next))) return i;
                    host.run(next, i == end ? SUMS_OF_BATCH : BOTH);
                }
            }
        }
        return DONE;
    }

    // Gives the host the rows of a chunk that begins after so many lanes.
    void give_rows(int before, int stride) {
        const int64_t of_lane = memory_.rows_size / stride_of(static_cast<int>(examples_.batch));
        give(ROWS, static_cast<char*>(memory_.rows) + before * of_lane, stride * of_lane);
        give(LOCAL, memory_.local, memory_.local_size);
    }

    // Clears the rows of the last chunk, because lanes beyond the last example must be zero.
    void clear_last(int lanes, int size) {
        const int before = (lanes - 1) / size * size, stride = stride_of(lanes - before);
        if (before + stride == lanes) return;
        give_rows(before, stride);
        for (const int space : {ROWS, LOCAL})
            if (size_[space]) std::memset(reinterpret_cast<void*>(base_[space]), 0, size_[space]);
    }

    // The host with the rows, images and labels of a chunk.
    Host<T> of_chunk(int lanes, int before, int batch) {
        const int stride = stride_of(lanes);
        if (before && lanes != stride) std::memset(memory_.local, 0, memory_.local_size);  // other chunks used it
        give_rows(before, stride);
        if (examples_.images) {
            const int64_t image = examples_.numbers * int64_t(sizeof(T)), label = sizeof(int64_t);
            give(IMAGES, static_cast<char*>(memory_.images) + before * image, lanes * image);
            give(LABELS, memory_.labels + before, lanes * label);
        }
        return {base_.data(), size_.data(), hosts_.spaces, {lanes, stride, before, batch},
                static_cast<T*>(memory_.scratch), memory_.scratch_size};
    }

    // Examples of the batch that begins here; a host with fewer examples than the others ends with -1.
    int left(int64_t h, int64_t start) const {
        int found = static_cast<int>(std::min(examples_.batch, examples_.count - start));
        if (examples_.order)
            while (found && examples_.order[h * examples_.count + start + found - 1] == -1) --found;
        return found;
    }

    // Copies a batch of images and labels; false if the data have no such example.
    bool gather(int64_t h, int64_t start, int found, int lanes) {
        const int64_t numbers = examples_.numbers;
        T* images = static_cast<T*>(memory_.images);
        for (int k = 0; k < found; ++k) {
            const int64_t place = h * examples_.count + start + k;
            const int64_t at = examples_.order ? examples_.order[place] : start + k;
            if (at < 0 || at >= examples_.available) return false;
            const int64_t* move = examples_.moves ? examples_.moves + place * 3 : nullptr;
            if (const T* table = static_cast<const T*>(examples_.table))
                copy_image(static_cast<const uint8_t*>(examples_.images) + at * numbers, table, move, images + k * numbers);
            else
                copy_image(static_cast<const T*>(examples_.images) + at * numbers, nullptr, move, images + k * numbers);
            memory_.labels[k] = examples_.labels[examples_.own_labels ? place : at];
        }
        std::fill_n(images + found * numbers, (lanes - found) * numbers, T(0));
        std::fill_n(memory_.labels + found, lanes - found, int64_t(-1));
        return true;
    }

    // An image, or a window of it; what lies beyond its border is black.
    template <class Stored> void copy_image(const Stored* from, const T* table, const int64_t* move, T* to) const {
        const int64_t height = examples_.height, width = examples_.width;
        for (int64_t c = 0; c < examples_.channels; ++c, from += height * width) {
            const T* of_channel = table ? table + c * 256 : nullptr;
            const auto value = [&](Stored x) {
                if constexpr (sizeof(Stored) == 1) return of_channel[x];
                else return T(x);
            };
            if (!move) {
                for (int64_t i = 0; i < height * width; ++i) *to++ = value(from[i]);
                continue;
            }
            for (int64_t y = 0; y < height; ++y) {
                const int64_t row = y + move[0] - examples_.border;
                for (int64_t x = 0; x < width; ++x) {
                    const int64_t column = (move[2] ? width - 1 - x : x) + move[1] - examples_.border;
                    const bool inside = row >= 0 && row < height && column >= 0 && column < width;
                    *to++ = value(inside ? from[row * width + column] : Stored(0));
                }
            }
        }
    }

    void give(int space, const void* memory, int64_t size) {
        base_[space] = reinterpret_cast<int64_t>(memory);
        size_[space] = size;
    }

    static int stride_of(int lanes) { return (lanes + LANES - 1) / LANES * LANES; }

    const Hosts& hosts_;
    const Examples& examples_;
    const Memory& memory_;
    std::vector<int64_t> base_, size_;  // of the host that runs
    int lanes_ = -1;                    // of its last batch
};

}  // namespace esper

extern "C" {

// Runs hosts that no other thread has taken, in numbers of 4 or 8 bytes. See Pass::run for the result.
int64_t esper_run(const esper::Hosts* hosts, const esper::Examples* examples, const esper::Memory* memory,
                  int64_t number_size) {
    if (number_size == sizeof(float)) return esper::Pass<float>(*hosts, *examples, *memory).run();
    return esper::Pass<double>(*hosts, *examples, *memory).run();
}

#define X(name, operands) #name " "
const char* esper_operations() { return ESPER_OPERATIONS(X); }
#undef X

int64_t esper_instruction_bytes() { return sizeof(esper::Instruction); }
}
