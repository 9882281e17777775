//! Access from outside of the plugin to the memory that it was given.

use host_memory::SharedMemory;

/// Copies bytes out of memory that no submission of this kit is writing.
pub fn read_at(memory: &SharedMemory, offset: usize, bytes: &mut [u8]) {
    // SAFETY: the kit's cases read memory only while no submission to it is under way. Finding a plugin that still writes is the
    // purpose of these cases, and each runs in a process of its own.
    unsafe { memory.read(offset, bytes) };
}

/// Copies bytes into memory that no submission of this kit is reading or writing.
pub fn write_at(memory: &SharedMemory, offset: usize, bytes: &[u8]) {
    // SAFETY: as in `read_at`, also for submissions that read the memory. And nothing has a reference to its bytes.
    unsafe { memory.write(offset, bytes) };
}

/// Copies bytes out of memory that a submission may be writing: through the file behind it, as another process would.
pub fn peek(memory: &SharedMemory, offset: usize, bytes: &mut [u8]) {
    let mut at = 0;
    while at < bytes.len() {
        match rustix::io::pread(memory.fd(), &mut bytes[at..], (offset + at) as u64) {
            Ok(read @ 1..) => at += read,
            // Not reached: memory of the kit is as long as it says.
            _ => return,
        }
    }
}

/// Fills memory that a submission may be writing, through the file behind it.
pub fn fill(memory: &SharedMemory, byte: u8) {
    let bytes = vec![byte; memory.bytes()];
    let mut at = 0;
    while at < bytes.len() {
        match rustix::io::pwrite(memory.fd(), &bytes[at..], at as u64) {
            Ok(written @ 1..) => at += written,
            _ => return,
        }
    }
}
