// Trunks from the text of a request itself; twins of functions in core/copies.py.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace {

constexpr int64_t MAX_MATCH = 64, NEAR = 64, MIN_COPY = 8;
constexpr int64_t PARTS = 10, FIRST_PART = PARTS - 8, NUM_CLASSES = 4, NUM_COUNTED = 2;
constexpr int64_t NO_PLACE = -1, NO_TOKEN = -1;
constexpr double MOST_SEEN = 2000.0, PRIOR_WEIGHT = 4.0;

// See Copies; as calls.py fills it in. Its texts, and what each request may copy from before them.
struct Copies {
  const int64_t* classes;
  int64_t *stands, *places, *matches;  // by req_state_idx
  double* counts;
  int64_t length, min_match, is_counting;
  const int64_t* idx_mapping;
  const int32_t* token_ids;
  const uint8_t* is_token;
  int64_t stride;
  const int64_t* last_positions;
  const int32_t* const* hints;
  const int64_t* hint_lengths;
  int64_t batch;
};

struct Text {
  const int32_t *hint, *token_ids;
  const uint8_t* is_token;
  int64_t hint_length, length;  // of the hint, and of both

  Text(const Copies& copies, int64_t b)
      : hint(copies.hints[b]), token_ids(copies.token_ids + b * copies.stride),
        is_token(copies.is_token ? copies.is_token + b * copies.stride : nullptr),
        hint_length(copies.last_positions[b] < 0 ? 0 : copies.hint_lengths[b]),
        length(hint_length + copies.last_positions[b] + 1) {}

  int64_t operator[](int64_t place) const {
    if (place < hint_length) return hint[place];
    place -= hint_length;
    return is_token && !is_token[place] ? NO_TOKEN : token_ids[place];
  }
};

// Where in the counts a match is.
int64_t part_of(int64_t match) {
  if (match < 4) return FIRST_PART + match - 1;
  return FIRST_PART + 64 - __builtin_clzll(uint64_t(std::min(match, MAX_MATCH)));
}

// See find_place; what it leaves is `match`.
int64_t find_place(const Text& text, int64_t stand, int64_t min_match, int64_t& match) {
  int64_t best_place = NO_PLACE, best_distance = 0;
  const int64_t last = text.length - 1, newest = last < 1 ? NO_TOKEN : text[last];
  match = 0;
  if (newest == NO_TOKEN) return NO_PLACE;
  for (int64_t place = last; place >= 1; place--) {
    // No match is longer, and all that are left are as far away.
    if (match == MAX_MATCH && (stand < 0 || stand - place >= best_distance)) break;
    if (text[place - 1] != newest) continue;
    int64_t length = 1;
    while (length < std::min(MAX_MATCH, place)) {
      const int64_t token = text[place - 1 - length];
      if (token == NO_TOKEN || token != text[last - length]) break;
      length++;
    }
    const int64_t distance = stand < 0 ? text.length - place : std::abs(place - stand);
    if (length < min_match && (stand < 0 || distance > NEAR)) continue;
    if (length < match || (length == match && distance >= best_distance)) continue;
    best_place = place, match = length, best_distance = distance;
  }
  return best_place;
}

}  // namespace

extern "C" {

// Writes tokens and chances [batch, length] of trunks.
void draft_copies(const Copies* ref, int64_t* token_ids, double* chances) {
  const Copies& copies = *ref;
  std::fill_n(token_ids, copies.batch * copies.length, NO_TOKEN);
  std::fill_n(chances, copies.batch * copies.length, 0.0);
  for (int64_t b = 0; b < copies.batch; b++) {
    const int64_t index = copies.idx_mapping[b], first = b * copies.length;
    const Text text(copies, b);
    int64_t& match = copies.matches[index];
    const int64_t place = find_place(text, copies.stands[index], copies.min_match, match);
    copies.places[index] = place;
    const int64_t size = place < 0 ? 0 : std::min(copies.length, text.length - place);
    for (int64_t i = 0; i < size; i++) {
      token_ids[first + i] = text[place + i];
      if (token_ids[first + i] == NO_TOKEN) continue;
      const int64_t part = part_of(match + i);
      const double* cell = copies.counts + (copies.classes[index] * PARTS + part) * 2;
      const double prior = PRIOR_WEIGHT * ((double(part) + 0.5) / PARTS);
      chances[first + i] = (cell[0] + prior) / (cell[1] + PRIOR_WEIGHT);
    }
  }
}

// Token ids [batch, width], padded with -1.
void learn_copies(const Copies* ref, const int64_t* token_ids, int64_t width) {
  const Copies& copies = *ref;
  constexpr int64_t CELLS = NUM_CLASSES * PARTS * 2;
  double increments[CELLS] = {};
  for (int64_t b = 0; b < copies.batch; b++) {
    const int64_t index = copies.idx_mapping[b], request_class = copies.classes[index];
    const int64_t place = copies.places[index], match = copies.matches[index];
    copies.places[index] = NO_PLACE;
    if (place < 0) continue;
    const Text text(copies, b);
    const int64_t size = std::min({copies.length, width, text.length - place});
    int64_t num_right = 0;
    for (bool is_right = true; is_right && num_right < size; num_right += is_right) {
      const int64_t copied = text[place + num_right], token = token_ids[b * width + num_right];
      is_right = copied == token && copied != NO_TOKEN;
      if (token == NO_TOKEN || copied == NO_TOKEN || request_class >= NUM_COUNTED) continue;
      double* cell = increments + (request_class * PARTS + part_of(match + num_right)) * 2;
      cell[0] += is_right, cell[1] += 1.0;
    }
    if (num_right && match + num_right >= MIN_COPY) copies.stands[index] = place + num_right;
  }
  for (int64_t cell = 0; copies.is_counting && cell < CELLS; cell += 2) {
    double* counts = copies.counts + cell;
    counts[0] += increments[cell], counts[1] += increments[cell + 1];
    if (counts[1] > MOST_SEEN) counts[0] *= 0.5, counts[1] *= 0.5;
  }
}

}  // extern "C"
