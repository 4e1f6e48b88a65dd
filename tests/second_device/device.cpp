// A torch device whose memory is the host's: what an accelerator does to code that was written on a CPU, without one.
//
// - A tensor on it is no CPU tensor: operators that mix devices, or two of its devices, raise.
// - What makes the host wait is told: reading a value, copies that block, synchronizing.
// - A copy to pinned memory that does not block arrives only when its event, stream or device is synchronized, or when a
//   stream that has waited for it reads that memory. Until then it reads as bytes of 0xff: NaN, or -1. It stays so if
//   the device's memory may have been used again meanwhile: it was freed without `record_stream`, and the stream that
//   it was allocated on has allocated once more without having waited for the copy.
// - A stream that reads what another stream has written, without having waited for it, raises.
//
// Operators run at once. Only their order, which streams and events make, is kept: for each stream how much it has done,
// and how much of each other stream it has waited for. What is done later than it is issued is in pending.cpp.
#include "device.h"
#include "pending.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <list>
#include <map>
#include <mutex>

namespace second_device {

namespace {

thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kNumDevices> current_streams{};

// The memory behind a storage of the device.
struct Block {
  void* data;
  size_t num_bytes;
  c10::DeviceIndex device;
  Stream stream;         // on which it was allocated, whose later work may get the memory once it is freed
  c10::Storage adopted;  // whose memory it is, if an operator has allocated it on the host
  std::optional<Moment> written;
  std::string writer;
  bool is_recorded = false;
};

struct LateCopy {
  Moment moment;
  Block* source;
  at::Tensor target, values;
  std::optional<Stream> freed_on = {};  // the stream that may use the source's memory again
  bool is_lost = false;
};

struct State {
  std::mutex mutex;
  c10::StreamId num_streams = 0;
  std::map<Stream, Clock> clocks;
  Clock host_clock;  // what the host has waited for comes before all that it issues then
  std::list<LateCopy> late_copies;
  std::map<uintptr_t, size_t> pinned_blocks;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kNumDevices> memory;
};

// Never freed: tensors may outlive this library.
State& state() {
  static State* state = new State;
  return *state;
}

using Arrived = std::list<LateCopy>;  // freed without the lock, which freeing memory takes

template <typename Function>
auto locked(Function function) {
  Lock lock(state().mutex);
  return function();
}

Stream key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

void merge(Clock& clock, const Clock& other) {
  for (auto& [stream, number] : other) clock[stream] = std::max(clock[stream], number);
}

bool has_seen(const Stream& stream, const Moment& moment) {
  auto seen = [&](Clock& clock) { return clock.count(moment.stream) && clock[moment.stream] >= moment.number; };
  return seen(state().clocks[stream]) || seen(state().host_clock);
}

template <typename Condition>
Arrived arrive(Condition is_due) {
  Arrived arrived;
  auto& late = state().late_copies;
  for (auto copy = late.begin(); copy != late.end();) {
    auto next = std::next(copy);
    if (is_due(*copy)) {
      auto& values = copy->values;
      if (!copy->is_lost) memcpy(copy->target.mutable_data_ptr(), values.const_data_ptr(), values.nbytes());
      arrived.splice(arrived.end(), late, copy);
    }
    copy = next;
  }
  return arrived;
}

// The host has seen all of this.
Arrived finish(const Clock& clock) {
  merge(state().host_clock, clock);
  return arrive([&](const LateCopy& copy) {
    auto done = clock.find(copy.moment.stream);
    return done != clock.end() && done->second >= copy.moment.number;
  });
}

// With the lock.
Clock current_clock(const Stream& stream) {
  Clock clock = state().clocks[stream];
  merge(clock, state().host_clock);
  return clock;
}

bool is_finished(const Clock& clock) {
  if (!is_done(clock)) return false;
  locked([&] { return finish(clock); });
  return true;
}

// The host waits, whatever may have to be waited for.
void finish_on_host(const Clock& clock) {
  block_host(clock);
  locked([&] { return finish(clock); });
}

// --- Memory ----------------------------------------------------------------------------------------------------------

void release_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    Lock lock(state().mutex);
    for (auto& copy : state().late_copies) {
      if (copy.source != block) continue;
      copy.source = nullptr;
      if (copy.moment.stream != block->stream && !block->is_recorded) copy.freed_on = block->stream;
    }
    state().memory[block->device].allocated_bytes[0].decrease(block->num_bytes);
  }
  if (!block->adopted) c10::free_cpu(block->data);
  delete block;
}

c10::DataPtr make_block(void* data, size_t num_bytes, c10::Storage adopted, c10::DeviceIndex device) {
  Stream stream = current_stream(device);
  auto* block = new Block{data, num_bytes, device, stream, std::move(adopted)};
  Lock lock(state().mutex);
  for (auto& copy : state().late_copies) copy.is_lost |= copy.freed_on == stream && !has_seen(stream, copy.moment);
  state().memory[device].allocated_bytes[0].increase(num_bytes);
  return {data, block, &release_block, c10::Device(kDevice, device)};
}

Block* block_of(const c10::DataPtr& pointer) { return pointer.cast_context<Block>(&release_block); }

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    return make_block(num_bytes ? c10::alloc_cpu(num_bytes) : nullptr, num_bytes, {}, current);
  }
  void copy_data(void* target, const void* source, size_t bytes) const override { memcpy(target, source, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream) override { record_stream(pointer); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    auto stats = state().memory[device];
    stats.reserved_bytes = stats.allocated_bytes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    state().memory[device].allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(state().mutex);
    state().memory[device].allocated_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    size_t total = size_t{1} << 40;
    return {total - getDeviceStats(device).allocated_bytes[0].current, total};
  }
};
Allocator device_allocator;
REGISTER_ALLOCATOR(kDevice, &device_allocator);

struct PinnedAllocator final : c10::Allocator {
  static void release(void* pointer) {
    if (pointer == nullptr) return;
    {
      Lock lock(state().mutex);
      state().pinned_blocks.erase(reinterpret_cast<uintptr_t>(pointer));
    }
    c10::free_cpu(pointer);
  }
  c10::DataPtr allocate(size_t num_bytes) override {
    void* pointer = num_bytes ? c10::alloc_cpu(num_bytes) : nullptr;
    if (pointer != nullptr) {
      Lock lock(state().mutex);
      state().pinned_blocks[reinterpret_cast<uintptr_t>(pointer)] = num_bytes;
    }
    return {pointer, pointer, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override { memcpy(target, source, bytes); }
};
PinnedAllocator pinned_allocator;

// --- Devices, streams and events -------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  Device getDevice() const override { return {kDevice, current}; }
  void setDevice(Device device) const override { set_device(complete(device).index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current = complete(device).index(); }
  Device exchangeDevice(Device device) const override {
    Device before(kDevice, current);
    setDevice(device);
    return before;
  }

  Stream getStream(Device device) const override {
    device = complete(device);
    return Stream(Stream::UNSAFE, device, current_streams[device.index()]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, complete(device)); }
  Stream getNewStream(Device device, int) const override {
    Lock lock(state().mutex);
    return Stream(Stream::UNSAFE, complete(device), ++state().num_streams);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    return is_finished(clock_of(key_of(stream)));
  }
  void synchronizeStream(const Stream& stream) const override {
    tell("stream.synchronize");
    finish_on_host(clock_of(key_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    wait_for_device("device.synchronize", device);
  }

  // An event is what its stream had done and waited for when it was recorded.
  void record(void** event, const Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(state().mutex);
    delete static_cast<Clock*>(*event);
    *event = new Clock(current_clock(key_of(stream)));
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock(state().mutex);
    if (event != nullptr) merge(state().clocks[key_of(stream)], *static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || is_finished(*static_cast<Clock*>(event));
  }
  void synchronizeEvent(void* event) const override {
    tell("event.synchronize");
    if (event != nullptr) finish_on_host(*static_cast<Clock*>(event));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream&) const override { record_stream(pointer); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Draws what a CPU generator draws, and is none.
struct Generator final : c10::GeneratorImpl {
  at::Generator host = at::detail::createCPUGenerator();
  explicit Generator(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(kDevice, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& new_state) override {
    host.unsafeGetGeneratorImpl()->set_state(new_state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* clone = new Generator(device_.index());
    clone->host = host.clone();
    return clone;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current;
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static auto* generators = [] {
      auto* made = new std::vector<at::Generator>;
      for (int i = 0; i < kNumDevices; i++) made->push_back(at::make_generator<Generator>(i));
      return made;
    }();
    return generators->at(index < 0 ? current : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Device getDeviceFromPtr(void*) const override { return {kDevice, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    DeviceScope scope(storage.device());
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = device_allocator.allocate(num_bytes);
    size_t num_kept = std::min(num_bytes, impl->nbytes());
    if (num_kept) memcpy(data.get(), impl->data(), num_kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(num_bytes);
  }
};
Hooks hooks;

}  // namespace

c10::DeviceIndex current_device() { return current; }

void set_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kNumDevices, "there are ", kNumDevices, " devices, not one of index ", int(index));
  current = index;
}

c10::Device complete(c10::Device device) { return {kDevice, device.index() < 0 ? current : device.index()}; }

Stream current_stream(c10::DeviceIndex device) { return {device, current_streams[device]}; }

Stream new_stream(c10::DeviceIndex device) {
  Lock lock(state().mutex);
  return {device, ++state().num_streams};
}

Clock clock_of(const Stream& stream) {
  Lock lock(state().mutex);
  return current_clock(stream);
}

Moment issue_after(const Stream& stream, const Stream& before) {
  Lock lock(state().mutex);
  auto& clock = state().clocks[stream];
  merge(clock, current_clock(before));
  return {stream, ++clock[stream]};
}

void let_stream_wait(const Stream& stream, const Moment& moment) {
  Lock lock(state().mutex);
  auto& number = state().clocks[stream][moment.stream];
  number = std::max(number, moment.number);
}

Moment issue(c10::Device device) {
  Lock lock(state().mutex);
  Stream stream = current_stream(device.index());
  auto& clock = state().clocks[stream];
  merge(clock, state().host_clock);
  return {stream, ++clock[stream]};
}

void check_is_written(const at::Tensor& tensor, const std::string& reader) {
  if (tensor.numel() == 0) return;
  Lock lock(state().mutex);
  auto* block = block_of(tensor.storage().data_ptr());
  if (block == nullptr || !block->written) return;
  Stream stream = current_stream(block->device);
  TORCH_CHECK(
      has_seen(stream, *block->written), reader, " on stream ", stream.second, " of ", tensor.device(),
      " reads what ", block->writer, " on stream ", block->written->stream.second, " of device ", int(block->written->stream.first),
      " has written, without having waited for it");
}

void set_written(const at::Tensor& tensor, Moment moment, const std::string& writer) {
  Lock lock(state().mutex);
  auto* block = block_of(tensor.storage().data_ptr());
  if (block == nullptr) return;
  block->written = moment;
  block->writer = writer;
}

void record_stream(const c10::DataPtr& pointer) {
  Lock lock(state().mutex);
  if (auto* block = block_of(pointer)) block->is_recorded = true;
}

c10::Allocator* allocator() { return &device_allocator; }

c10::DataPtr adopt(const c10::Storage& host, c10::Device device) {
  return make_block(host.unsafeGetStorageImpl()->mutable_data(), host.nbytes(), host, device.index());
}

// FSDP2's offloading trusts this: were every pointer called pinned, it would train on stale shards.
bool is_pinned(const void* pointer) {
  Lock lock(state().mutex);
  auto& blocks = state().pinned_blocks;
  auto block = blocks.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (block == blocks.begin()) return false;
  --block;
  return reinterpret_cast<uintptr_t>(pointer) < block->first + block->second;
}

at::Generator default_generator(c10::DeviceIndex index) { return hooks.getDefaultGenerator(index); }

at::Generator host_generator(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

void copy_late(const at::Tensor& source, const at::Tensor& target, const at::Tensor& values) {
  auto moment = issue(source.device());
  memset(target.mutable_data_ptr(), 0xff, target.nbytes());
  Lock lock(state().mutex);
  state().late_copies.push_back({moment, block_of(source.storage().data_ptr()), target, values});
}

void deliver_to_device(const at::Tensor& pinned, c10::Device device) {
  Stream stream = current_stream(device.index());
  locked([&] {
    return arrive([&](const LateCopy& copy) {
      return copy.target.storage().is_alias_of(pinned.storage()) && has_seen(stream, copy.moment);
    });
  });
}

void wait_for_stream(const std::string& what, c10::Device device) {
  tell(what);
  finish_on_host(clock_of(current_stream(device.index())));
}

void wait_for_device(const std::string& what, c10::DeviceIndex device) {
  tell(what);
  Clock all = locked([&] {
    Clock all;
    for (auto& [stream, clock] : state().clocks) {
      if (stream.first == device) merge(all, clock);
    }
    return all;
  });
  finish_on_host(all);
}

void register_hooks() { at::RegisterPrivateUse1HooksInterface(&hooks); }

}  // namespace second_device
