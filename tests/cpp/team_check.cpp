// A team under the thread sanitizer: each item of each loop is computed once, whoever comes late or
// never; errors of loops arrive; no thread is left behind.
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../../csrc/cpu/team.h"

namespace fusedrnn::check {
namespace {

using cpu::Team;

int failures = 0;

void expect(bool ok, const char* what, int64_t at) {
  if (!ok && ++failures <= 20) std::printf("FAILED %s at %lld\n", what, static_cast<long long>(at));
}

// Loops of all sizes.  No number is atomic: the sanitizer sees if loops are not in order.
void loops(Team& team, int64_t count_of_loops) {
  const Team::Leading leading(team);
  std::vector<int64_t> numbers(500);
  for (int64_t loop = 1; loop <= count_of_loops; ++loop) {
    const int64_t count = loop * 37 % 499 + 1, grain = loop % 7 + 1;
    // Some loops are worth waking for, and in some the members have fallen asleep.
    if (loop % 97 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    Team::led()->share(count, grain, loop % 3 * 32'768, [&](int64_t first, int64_t last) {
      if (loop % 61 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
      for (int64_t i = first; i < last; ++i) numbers[size_t(i)] += loop;
    });
    for (int64_t i = 0; i < int64_t(numbers.size()); ++i) {
      expect(numbers[size_t(i)] == (i < count ? loop : 0), "an item", loop);
      numbers[size_t(i)] = 0;
    }
  }
}

// Members that come before the first loop, during the loops, and after the last one.
template <class F>
void with_members(int64_t members, int64_t that_come, int64_t delay, const F& f) {
  Team team(members);
  std::vector<std::thread> threads;
  for (int64_t m = 1; m <= that_come; ++m) {
    threads.emplace_back([&team, m, delay] {
      std::this_thread::sleep_for(std::chrono::microseconds(m * delay));
      team.work(m);
    });
  }
  f(team);
  for (std::thread& thread : threads) thread.join();
}

void all_items() {
  for (const int64_t members : {1, 2, 3, 8}) {
    for (const int64_t delay : {0, 300, 100'000}) {
      with_members(members, members - 1, delay, [](Team& team) { loops(team, 1'000); });
    }
    with_members(members, members / 2, 0, [](Team& team) { loops(team, 1'000); });
    with_members(members, 0, 0, [](Team& team) { loops(team, 100); });
  }
}

// Members that see the last loop begin and are then held up, until the work has ended: more threads
// than cores, and teams that end at once.
void short_teams() {
  constexpr int64_t kTeams = 3'000, kMembers = 8;
  std::barrier<> every(kMembers);
  std::unique_ptr<Team> team;
  std::vector<std::thread> threads;
  for (int64_t m = 1; m < kMembers; ++m) {
    threads.emplace_back([&, m] {
      for (int64_t i = 0; i < kTeams; ++i) {
        every.arrive_and_wait();
        team->work(m);
        every.arrive_and_wait();
      }
    });
  }
  for (int64_t i = 0; i < kTeams; ++i) {
    team = std::make_unique<Team>(kMembers);
    every.arrive_and_wait();
    std::atomic<int64_t> done{0};
    {
      const Team::Leading leading(*team);
      for (int64_t loop = 0; loop <= i % 3; ++loop) {
        team->share(4, 1, 4'096, [&](int64_t first, int64_t last) { done += last - first; });
      }
    }
    expect(done == 4 * (i % 3 + 1), "a short team", i);
    every.arrive_and_wait();
  }
  for (std::thread& thread : threads) thread.join();
}

void many_items() {
  with_members(2, 1, 0, [](Team& team) {
    const Team::Leading leading(team);
    constexpr int64_t kCount = (int64_t{1} << 32) + 5;  // more than a range can say
    std::atomic<int64_t> sum{0};
    team.share(kCount, kCount / 16, kCount,
               [&](int64_t first, int64_t last) { sum += last - first; });
    expect(sum == kCount, "the number of items", sum);
  });
}

void errors() {
  with_members(3, 2, 0, [](Team& team) {
    const Team::Leading leading(team);
    for (int64_t bad = 0; bad < 100; ++bad) {
      bool is_thrown = false;
      std::atomic<int64_t> done{0};
      try {
        team.share(100, 1, 1'000'000, [&](int64_t first, int64_t last) {
          done += last - first;
          if (first <= bad && bad < last) throw std::runtime_error("this one");
        });
      } catch (const std::runtime_error& error) {
        is_thrown = std::strcmp(error.what(), "this one") == 0;
      }
      expect(is_thrown && done == 100, "an error", bad);
    }
  });
  // The leader itself fails: members end nevertheless.
  try {
    Team team(2);
    std::thread member([&team] { team.work(1); });
    try {
      const Team::Leading leading(team);
      throw std::runtime_error("between loops");
    } catch (...) {
      member.join();
      throw;
    }
  } catch (const std::runtime_error&) {
  }
  expect(Team::led() == nullptr, "the leader after its team", 0);
}

}  // namespace
}  // namespace fusedrnn::check

int main() {
  fusedrnn::check::all_items();
  fusedrnn::check::short_teams();
  fusedrnn::check::many_items();
  fusedrnn::check::errors();
  std::printf("%d failures\n", fusedrnn::check::failures);
  return fusedrnn::check::failures != 0;
}
