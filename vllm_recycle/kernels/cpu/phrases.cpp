// The phrase pool of Ouroboros; twins of functions in core/phrase_pool.py.

#include <algorithm>
#include <cstdint>

extern "C" {

void newest_phrases(const int32_t* table, const int64_t* token_ids, int64_t num_tokens,
                    int64_t count, int64_t per_token, int64_t length, int64_t* newest) {
  for (int64_t i = 0; i < num_tokens; ++i) {
    for (int64_t place = 1; place <= count; ++place, newest += length) {
      if (token_ids[i] < 0) {
        std::fill(newest, newest + length, -1);
      } else {
        const int32_t* phrase = table + ((token_ids[i] + 1) * per_token - place) * length;
        std::copy(phrase, phrase + length, newest);
      }
    }
  }
}

void insert_phrases(int32_t* table, const int64_t* token_ids, const int64_t* phrases,
                    const int64_t* replaced, int64_t num_phrases, int64_t per_token,
                    int64_t length) {
  auto is_phrase = [&](int64_t i) {
    const int64_t* phrase = phrases + i * length;
    return token_ids[i] >= 0 && *std::min_element(phrase, phrase + length) >= 0;
  };
  // Where a token has a phrase; beyond its last place where it has not.
  auto find = [&](int32_t* places, const int64_t* phrase) {
    int64_t place = 0;
    while (place < per_token && !std::equal(phrase, phrase + length, places)) {
      ++place, places += length;
    }
    return place;
  };
  if (replaced != nullptr) {
    for (int64_t i = 0; i < num_phrases; ++i) {
      if (!is_phrase(i)) continue;
      int32_t* places = table + token_ids[i] * per_token * length;
      int64_t place = find(places, replaced + i * length);
      if (place == per_token) continue;
      std::copy_backward(places, places + place * length, places + (place + 1) * length);
      std::fill(places, places + length, -1);
    }
  }
  for (int64_t i = 0; i < num_phrases; ++i) {
    if (!is_phrase(i)) continue;
    int32_t* places = table + token_ids[i] * per_token * length;
    int64_t place = find(places, phrases + i * length);
    // In the place of an equal one or of the oldest, and then as the newest.
    int32_t* gone = places + (place == per_token ? 0 : place) * length;
    int32_t* newest = std::copy(gone + length, places + per_token * length, gone);
    std::copy(phrases + i * length, phrases + (i + 1) * length, newest);
  }
}

}  // extern "C"
