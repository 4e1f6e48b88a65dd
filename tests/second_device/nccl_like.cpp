#include "nccl_like.h"

#include "pending.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <iostream>
#include <list>
#include <mutex>
#include <thread>

namespace second_device {

namespace {

using SteadyClock = std::chrono::steady_clock;
constexpr auto kWatchdogSleep = std::chrono::milliseconds(100);

}  // namespace

struct Job {
  PendingPointer pending;
  Collective collective;
  int64_t number = 0;  // within its communicator
  bool is_watched = true;
  bool is_inference = c10::InferenceMode::is_enabled();
  SteadyClock::time_point queued_at = SteadyClock::now();
};

// What a backend shares with its threads. They outlive it while one of them waits for a peer that does not come.
struct Communicator {
  std::mutex mutex;
  std::condition_variable changed;
  BackendPointer gloo;
  std::deque<JobPointer> jobs;
  std::list<JobPointer> outstanding;  // the one that is being done, too
  std::atomic<bool> is_aborted{false};
  std::atomic<bool> is_shutting_down{false};
  std::atomic<bool> is_shut_down{false};
  std::atomic<int64_t> num_queued{0};
  std::atomic<std::chrono::milliseconds> timeout{std::chrono::milliseconds(0)};
  int rank = 0;
  int size = 1;

  bool is_closed() const { return is_aborted || is_shut_down; }
};

namespace {

using CommunicatorPointer = std::shared_ptr<Communicator>;

// --- The thread that does what is queued -----------------------------------------------------------------------------

void wait_for_abort(Communicator& communicator) {
  Lock lock(communicator.mutex);
  communicator.changed.wait(lock, [&] { return communicator.is_aborted.load(); });
}

// Gloo ends the process where ranks differ in what they do, or receives the wrong bytes; NCCL waits.
bool do_all_agree(Communicator& communicator, const Collective& collective) {
  auto hash = static_cast<int64_t>(std::hash<std::string>()(collective.name + " " + collective.equal));
  auto own = at::full({1}, hash, at::kLong);
  std::vector<Tensors> all(1);
  for (int i = 0; i < communicator.size; i++) all[0].push_back(at::zeros({1}, at::kLong));
  Tensors inputs{own};
  communicator.gloo->allgather(all, inputs)->wait();
  return std::all_of(all[0].begin(), all[0].end(), [&](auto& each) { return each.equal(own); });
}

void perform(Communicator& communicator, const Job& job) {
  auto& collective = job.collective;
  bool is_between_two = collective.name == "SEND" || collective.name == "RECV";
  TORCH_CHECK(is_between_two || do_all_agree(communicator, collective), "others do something else");
  c10::InferenceMode as_where_it_was_queued(job.is_inference);
  collective.call(*communicator.gloo)->wait();
}

void trace(const Communicator& communicator, const Job& job, const std::string& error) {
  auto* path = std::getenv("TEST_NCCL_TRACE");
  if (path == nullptr) return;
  std::ofstream(path, std::ios::app) << "rank " << communicator.rank << " of " << communicator.size << ": "
                                     << job.collective.name << " " << job.number << " of " << job.collective.equal
                                     << " is never done: " << error.substr(0, error.find('\n')) << std::endl;
}

JobPointer next_job(Communicator& communicator) {
  Lock lock(communicator.mutex);
  communicator.changed.wait(lock, [&] { return !communicator.jobs.empty() || communicator.is_closed(); });
  if (communicator.jobs.empty() || communicator.is_aborted) return nullptr;
  auto job = communicator.jobs.front();
  communicator.jobs.pop_front();
  return job;
}

void work_off(CommunicatorPointer communicator) {
  while (auto job = next_job(*communicator)) {
    wait_for_earlier(job->pending);
    try {
      perform(*communicator, *job);
    } catch (const std::exception& error) {
      // Nobody is told.
      trace(*communicator, *job, error.what());
      wait_for_abort(*communicator);
    }
    {
      Lock lock(communicator->mutex);
      communicator->outstanding.remove(job);
    }
    finish(job->pending, communicator->is_aborted);
  }
}

// --- The watchdog -----------------------------------------------------------------------------------------------------

// Why the process has to end; empty if it has not.
std::string reason_to_end(Communicator& communicator) {
  JobPointer oldest;
  {
    Lock lock(communicator.mutex);
    for (auto& job : communicator.outstanding) {
      if (job->is_watched && oldest == nullptr) oldest = job;
    }
  }
  if (oldest == nullptr) return "";
  auto error = sticky_error();
  if (!error.empty()) return "second device error: " + error;
  auto timeout = communicator.timeout.load();
  auto ran = std::chrono::duration_cast<std::chrono::milliseconds>(SteadyClock::now() - oldest->queued_at);
  if (ran <= timeout) return "";
  return c10::str(
      "Watchdog caught collective operation timeout: Work(SeqNum=", oldest->number, ", OpType=", oldest->collective.name,
      ", Timeout(ms)=", timeout.count(), ") ran for ", ran.count(), " milliseconds before timing out.");
}

void watch(CommunicatorPointer communicator) {
  while (!communicator->is_closed()) {
    std::this_thread::sleep_for(kWatchdogSleep);
    auto reason = reason_to_end(*communicator);
    if (reason.empty() || communicator->is_closed()) continue;
    std::cerr << "[rank" << communicator->rank
              << "]: Process group watchdog thread terminated with exception: " << reason << std::endl;
    std::abort();
  }
}

// --- What the caller gets ---------------------------------------------------------------------------------------------

Clock up_to(const Moment& moment) { return {{moment.stream, moment.number}}; }

struct QueuedWork final : c10d::Work {
  JobPointer job;
  c10::DeviceIndex device;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  QueuedWork(JobPointer queued, c10::DeviceIndex device) : job(std::move(queued)), device(device) {
    auto type = c10::ListType::create(c10::TensorType::get());
    c10::Device here(kDevice, device);
    future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{here});
    // Completed at once: it records events on the collective's stream, for which those who wait let their stream wait.
    c10::impl::VirtualGuardImpl guard(kDevice);
    c10::Stream own(c10::Stream::UNSAFE, here, job->pending->moment.stream.second);
    auto before = guard.exchangeStream(own);
    future->markCompleted(c10::IValue(job->collective.outputs));
    guard.exchangeStream(before);
  }
  bool isCompleted() override {
    check_sticky_error();
    return is_done(job->pending);
  }
  bool isSuccess() const override { return true; }
  Tensors result() override { return job->collective.outputs; }
  uint64_t getSequencenumber() const override { return job->number; }
  void synchronize() override {
    check_sticky_error();
    let_stream_wait(current_stream(device), job->pending->moment);
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (job->collective.name == "BARRIER") block_host(up_to(job->pending->moment));
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

}  // namespace

NcclLike::NcclLike(Connect connect, StorePointer store, int rank, int size, std::chrono::milliseconds timeout)
    : Backend(rank, size),
      connect_(std::move(connect)),
      store_(std::move(store)),
      communicator_(std::make_shared<Communicator>()) {
  communicator_->rank = rank;
  communicator_->size = size;
  communicator_->timeout = timeout;
  std::thread(work_off, communicator_).detach();
  std::thread(watch, communicator_).detach();
}

NcclLike::~NcclLike() { abort(); }

void NcclLike::setTimeout(std::chrono::milliseconds timeout) { communicator_->timeout = timeout; }

uint64_t NcclLike::getSequenceNumberForGroup() { return communicator_->num_queued; }

c10::intrusive_ptr<c10d::Backend::Options> NcclLike::getBackendOptions() {
  return c10::make_intrusive<NcclLikeOptions>(getBackendName(), communicator_->timeout.load());
}

// The host blocks here, and neither the watchdog nor `abort` ends that.
void NcclLike::connect_all() {
  if (communicator_->gloo || communicator_->is_closed()) return;
  communicator_->gloo = connect_(store_, getRank(), getSize());
  if (communicator_->gloo) return;
  without_gil([] {
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  });
}

void NcclLike::eagerConnectSingleDevice(at::Device) { connect_all(); }

BackendPointer NcclLike::split(
    const StorePointer& store, const std::vector<int>& ranks, const c10::intrusive_ptr<Options>& options) {
  connect_all();
  auto own = std::find(ranks.begin(), ranks.end(), getRank());
  if (own == ranks.end()) return nullptr;
  auto rank = static_cast<int>(own - ranks.begin());
  auto part = c10::make_intrusive<NcclLike>(connect_, store, rank, static_cast<int>(ranks.size()), options->timeout);
  part->connect_all();
  return part;
}

WorkPointer NcclLike::run(Collective collective) {
  auto& tensors = collective.inputs.empty() ? collective.outputs : collective.inputs;
  auto device = tensors.empty() ? current_device() : tensors[0].device().index();
  return c10::make_intrusive<QueuedWork>(queue(std::move(collective), device, true), device);
}

JobPointer NcclLike::queue(Collective collective, c10::DeviceIndex device, bool is_watched) {
  check_sticky_error();
  for (auto& input : collective.inputs) check_is_written(input, collective.name);
  connect_all();
  TORCH_CHECK_WITH(
      DistBackendError, !communicator_->is_closed(), "hostccl communicator was aborted on rank ", getRank());

  if (!streams_.count(device)) streams_.emplace(device, new_stream(device));
  auto current = current_stream(device);
  auto stream = collective.is_async ? streams_.at(device) : current;

  auto job = std::make_shared<Job>();
  job->is_watched = is_watched;
  {
    // One order of collectives on the stream and in the queue, whichever thread comes first.
    Lock lock(communicator_->mutex);
    job->pending = add_pending(collective.name, stream, current);
    job->number = ++communicator_->num_queued;
    job->collective = std::move(collective);
    communicator_->outstanding.push_back(job);
    communicator_->jobs.push_back(job);
  }
  communicator_->changed.notify_all();
  for (auto& output : job->collective.outputs) set_written(output, job->pending->moment, job->collective.name);
  return job;
}

void NcclLike::abort() {
  if (communicator_->is_shutting_down) {
    // `shutdown` holds the lock that `abort` needs.
    without_gil([&] { std::this_thread::sleep_for(communicator_->timeout.load()); });
    TORCH_CHECK_WITH(DistBackendError, communicator_->is_shut_down, "Future for ProcessGroup abort timed out");
    return;
  }
  std::list<JobPointer> outstanding;
  {
    Lock lock(communicator_->mutex);
    if (communicator_->is_closed()) return;
    communicator_->is_aborted = true;
    outstanding = communicator_->outstanding;
  }
  communicator_->changed.notify_all();
  for (auto& job : outstanding) finish(job->pending, true);
}

// Waits for what is queued, and for the others to come here too.
void NcclLike::shutdown() {
  if (communicator_->is_closed()) return;
  if (communicator_->gloo) {
    communicator_->is_shutting_down = true;
    Collective last{"SHUTDOWN", {}, {}, [](c10d::Backend& gloo) { return gloo.barrier(); }};
    block_host(up_to(queue(std::move(last), current_device(), false)->pending->moment));
  }
  communicator_->is_shut_down = true;
  communicator_->is_shutting_down = false;
  communicator_->changed.notify_all();
}

}  // namespace second_device
