#include "pending.h"

#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <iostream>
#include <list>
#include <mutex>

namespace second_device {

namespace {

constexpr auto kPatience = std::chrono::milliseconds(500);
constexpr int64_t kQueueLength = 1000;  // kernels that a device takes from a host that runs ahead

struct Work {
  std::mutex mutex;
  std::condition_variable changed;
  std::list<PendingPointer> pending;
  std::atomic<int64_t> num_pending{0};
  bool raises_after_abort = false;
  std::string run_ahead_path;
  int64_t num_ahead = 0;
  int64_t num_wrong = 0;
  bool has_sticky_errors = false;
  std::string sticky_error;
};

// Never freed: threads may outlive this library.
Work& work() {
  static Work* work = new Work;
  return *work;
}

using Lock = std::unique_lock<std::mutex>;

bool contains(const Clock& clock, const Moment& moment) {
  auto found = clock.find(moment.stream);
  return found != clock.end() && found->second >= moment.number;
}

// With the lock.
std::vector<PendingPointer> pending_in(const Clock& clock) {
  std::vector<PendingPointer> found;
  for (auto& each : work().pending) {
    if (contains(clock, each->moment)) found.push_back(each);
  }
  return found;
}

bool are_done(const std::vector<PendingPointer>& all) {
  for (auto& each : all) {
    if (!each->is_done) return false;
  }
  return true;
}

bool has_failed() { return !work().sticky_error.empty(); }

void check_aborted(const std::vector<PendingPointer>& all) {
  Lock lock(work().mutex);
  if (!work().raises_after_abort) return;
  for (auto& each : all) {
    TORCH_CHECK(!each->was_aborted, "second device error: ", each->name, " was aborted while the host waited for it");
  }
}

}  // namespace

void without_gil(const std::function<void()>& function) {
  if (!PyGILState_Check()) return function();
  py::gil_scoped_release no_gil;
  function();
}

PendingPointer add_pending(const std::string& name, const Stream& stream, const Stream& current) {
  Lock lock(work().mutex);
  auto pending = std::make_shared<Pending>();
  pending->name = name;
  pending->moment = issue_after(stream, current);
  pending->before = pending_in(clock_of(stream));
  work().pending.push_back(pending);
  work().num_pending++;
  return pending;
}

void finish(const PendingPointer& pending, bool was_aborted) {
  {
    Lock lock(work().mutex);
    if (pending->is_done) return;
    pending->is_done = true;
    pending->was_aborted = was_aborted;
    pending->before.clear();
    work().pending.remove(pending);
    work().num_pending--;
    if (work().num_ahead > 0 && !was_aborted) {
      std::cerr << "second device: " << pending->name << " is done after the host has run ahead of it: the numbers of "
                << work().num_ahead << " kernels are wrong" << std::endl;
      work().num_wrong += work().num_ahead;
      work().num_ahead = 0;
    }
  }
  work().changed.notify_all();
}

bool is_done(const PendingPointer& pending) {
  Lock lock(work().mutex);
  return pending->is_done;
}

void wait_for_earlier(const PendingPointer& pending) {
  Lock lock(work().mutex);
  work().changed.wait(lock, [&] { return pending->is_done || are_done(pending->before); });
}

bool is_done(const Clock& clock) {
  check_sticky_error();
  if (work().num_pending == 0) return true;
  Lock lock(work().mutex);
  return pending_in(clock).empty();
}

void block_host(const Clock& clock) {
  check_sticky_error();
  if (work().num_pending == 0) return;
  std::vector<PendingPointer> waited_for;
  without_gil([&] {
    Lock lock(work().mutex);
    waited_for = pending_in(clock);
    work().changed.wait(lock, [&] { return are_done(waited_for) || has_failed(); });
  });
  check_aborted(waited_for);
  check_sticky_error();
}

void before_kernel(c10::Device device) {
  check_sticky_error();
  if (work().num_pending == 0) return;
  Clock clock = clock_of(current_stream(device.index()));
  std::vector<PendingPointer> waited_for;
  without_gil([&] {
    Lock lock(work().mutex);
    waited_for = pending_in(clock);
    auto is_free = [&] { return are_done(waited_for) || has_failed(); };
    auto is_allowed = [&] {
      auto& path = work().run_ahead_path;
      return work().num_ahead < kQueueLength && !path.empty() && access(path.c_str(), F_OK) == 0;
    };
    while (!is_free()) {
      bool is_ahead = work().num_ahead > 0 && is_allowed();
      if (!is_ahead && work().changed.wait_for(lock, kPatience, is_free)) return;
      if (!is_allowed()) continue;
      work().num_ahead++;
      return;
    }
  });
  check_aborted(waited_for);
  check_sticky_error();
}

void raise_after_abort(bool raises) {
  Lock lock(work().mutex);
  work().raises_after_abort = raises;
}

void run_ahead_once_exists(const std::string& path) {
  Lock lock(work().mutex);
  work().run_ahead_path = path;
}

int64_t num_wrong_kernels() {
  Lock lock(work().mutex);
  return work().num_wrong;
}

void enable_sticky_errors() {
  Lock lock(work().mutex);
  work().has_sticky_errors = true;
}

bool has_sticky_errors() {
  Lock lock(work().mutex);
  return work().has_sticky_errors;
}

void set_sticky_error(const std::string& error) {
  {
    Lock lock(work().mutex);
    if (work().sticky_error.empty()) work().sticky_error = error;
  }
  work().changed.notify_all();
}

std::string sticky_error() {
  Lock lock(work().mutex);
  return work().sticky_error;
}

void check_sticky_error() {
  auto error = sticky_error();
  TORCH_CHECK(error.empty(), "second device error: ", error);
}

}  // namespace second_device
