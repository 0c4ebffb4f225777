// Moving keys and values in the caches of all layers; the twin of the torch function of that name.
//
// Plain C interface, as in tree_attention.cpp.

#include <cstdint>
#include <vector>

namespace {

// All elements are read before one is written.
template <typename T>
void move_elements(T* cache, const int64_t* read, const int64_t* write, int64_t count,
                   std::vector<T>& buffer) {
  buffer.resize(count);
  for (int64_t i = 0; i < count; i++) buffer[i] = cache[read[i]];
  for (int64_t i = 0; i < count; i++) cache[write[i]] = buffer[i];
}

template <typename T>
void move_in_each(void* const* caches, int64_t num_caches, const int64_t* read,
                  const int64_t* write, int64_t count, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<T> buffer;
#pragma omp for
    for (int64_t i = 0; i < num_caches; i++) {
      move_elements(static_cast<T*>(caches[i]), read, write, count, buffer);
    }
  }
}

}  // namespace

extern "C" {

// Elements are of 2 bytes, or of 4.
void move_slots(void* const* caches, int64_t num_caches, int64_t element_size,
                const int64_t* read, const int64_t* write, int64_t count, int64_t threads) {
  auto move = element_size == 2 ? move_in_each<uint16_t> : move_in_each<uint32_t>;
  move(caches, num_caches, read, write, count, threads);
}

}  // extern "C"
