// What the device has yet to do: collectives that are queued on a stream and done later, by another thread. Kernels run
// as soon as all is done that their stream has waited for; the host waits for them in reads and when it synchronizes.
#pragma once

#include "device.h"

#include <functional>
#include <memory>
#include <vector>

namespace second_device {

struct Pending {
  Moment moment;
  std::string name;
  std::vector<std::shared_ptr<Pending>> before;  // what the stream has waited for
  bool is_done = false;
  bool was_aborted = false;
};
using PendingPointer = std::shared_ptr<Pending>;

// On `stream`, which waits for all that `current` has been given so far.
PendingPointer add_pending(const std::string& name, const Stream& stream, const Stream& current);
void finish(const PendingPointer& pending, bool was_aborted);
bool is_done(const PendingPointer& pending);
void wait_for_earlier(const PendingPointer& pending);  // a thread that does such work, not the host

// What the host asks and waits for. It waits without the interpreter's lock, and no signal ends it, as in a driver.
bool is_done(const Clock& clock);
void block_host(const Clock& clock);
void before_kernel(c10::Device device);
void without_gil(const std::function<void()>& function);

// Whether the host is freed from work that was aborted with an error, or as if the work were done.
void raise_after_abort(bool raises);

// Once this file exists, the host goes on after half a second although its stream waits for a collective, as it does on
// a device, which queues kernels. Here they run at once, on numbers that do not count: for collectives that never come.
void run_ahead_once_exists(const std::string& path);
int64_t num_wrong_kernels();  // run ahead of a collective that was done in the end

// The first error inside a kernel. Every later call on the device raises it.
void enable_sticky_errors();
bool has_sticky_errors();
void set_sticky_error(const std::string& error);
std::string sticky_error();
void check_sticky_error();

}  // namespace second_device
