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

struct Queue {
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
Queue& queue() {
  static Queue* queue = new Queue;
  return *queue;
}

bool contains(const Clock& clock, const Moment& moment) {
  auto found = clock.find(moment.stream);
  return found != clock.end() && found->second >= moment.number;
}

// With the lock.
std::vector<PendingPointer> pending_in(const Clock& clock) {
  std::vector<PendingPointer> found;
  for (auto& each : queue().pending) {
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

bool has_failed() { return !queue().sticky_error.empty(); }

void check_aborted(const std::vector<PendingPointer>& all) {
  Lock lock(queue().mutex);
  if (!queue().raises_after_abort) return;
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
  Lock lock(queue().mutex);
  auto pending = std::make_shared<Pending>();
  pending->name = name;
  pending->moment = issue_after(stream, current);
  pending->before = pending_in(clock_of(stream));
  queue().pending.push_back(pending);
  queue().num_pending++;
  return pending;
}

void finish(const PendingPointer& pending, bool was_aborted) {
  {
    Lock lock(queue().mutex);
    if (pending->is_done) return;
    pending->is_done = true;
    pending->was_aborted = was_aborted;
    pending->before.clear();
    queue().pending.remove(pending);
    queue().num_pending--;
    if (queue().num_ahead > 0 && !was_aborted) {
      std::cerr << "second device: " << pending->name << " is done after the host has run ahead of it: the numbers of "
                << queue().num_ahead << " kernels are wrong" << std::endl;
      queue().num_wrong += queue().num_ahead;
      queue().num_ahead = 0;
    }
  }
  queue().changed.notify_all();
}

bool is_done(const PendingPointer& pending) {
  Lock lock(queue().mutex);
  return pending->is_done;
}

void wait_for_earlier(const PendingPointer& pending) {
  Lock lock(queue().mutex);
  queue().changed.wait(lock, [&] { return pending->is_done || are_done(pending->before); });
}

bool is_done(const Clock& clock) {
  check_sticky_error();
  if (queue().num_pending == 0) return true;
  Lock lock(queue().mutex);
  return pending_in(clock).empty();
}

void block_host(const Clock& clock) {
  check_sticky_error();
  if (queue().num_pending == 0) return;
  std::vector<PendingPointer> waited_for;
  without_gil([&] {
    Lock lock(queue().mutex);
    waited_for = pending_in(clock);
    queue().changed.wait(lock, [&] { return are_done(waited_for) || has_failed(); });
  });
  check_aborted(waited_for);
  check_sticky_error();
}

void before_kernel(c10::Device device) {
  check_sticky_error();
  if (queue().num_pending == 0) return;
  Clock clock = clock_of(current_stream(device.index()));
  std::vector<PendingPointer> waited_for;
  without_gil([&] {
    Lock lock(queue().mutex);
    waited_for = pending_in(clock);
    auto is_free = [&] { return are_done(waited_for) || has_failed(); };
    auto is_allowed = [&] {
      auto& path = queue().run_ahead_path;
      return queue().num_ahead < kQueueLength && !path.empty() && access(path.c_str(), F_OK) == 0;
    };
    while (!is_free()) {
      bool is_ahead = queue().num_ahead > 0 && is_allowed();
      if (!is_ahead && queue().changed.wait_for(lock, kPatience, is_free)) return;
      if (!is_allowed()) continue;
      queue().num_ahead++;
      return;
    }
  });
  check_aborted(waited_for);
  check_sticky_error();
}

void raise_after_abort(bool raises) {
  Lock lock(queue().mutex);
  queue().raises_after_abort = raises;
}

void run_ahead_once_exists(const std::string& path) {
  Lock lock(queue().mutex);
  queue().run_ahead_path = path;
}

int64_t num_wrong_kernels() {
  Lock lock(queue().mutex);
  return queue().num_wrong;
}

void enable_sticky_errors() {
  Lock lock(queue().mutex);
  queue().has_sticky_errors = true;
}

bool has_sticky_errors() {
  Lock lock(queue().mutex);
  return queue().has_sticky_errors;
}

void set_sticky_error(const std::string& error) {
  {
    Lock lock(queue().mutex);
    if (queue().sticky_error.empty()) queue().sticky_error = error;
  }
  queue().changed.notify_all();
}

std::string sticky_error() {
  Lock lock(queue().mutex);
  return queue().sticky_error;
}

void check_sticky_error() {
  auto error = sticky_error();
  TORCH_CHECK(error.empty(), "second device error: ", error);
}

}  // namespace second_device
