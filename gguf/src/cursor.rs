//! Reads through a header, whose length is known only from its contents.

use crate::{Error, ReadAt};

/// Bytes that are fetched at once.
const FETCH: u64 = 64 << 10;
/// Most bytes of a header. The largest vocabularies in use take 12 MiB.
const MAX_HEADER: u64 = 256 << 20;

/// A position in a header, with the bytes after it that were fetched already.
pub(crate) struct Cursor<'a, S> {
    source: &'a S,
    /// Bytes of the file.
    pub size: u64,
    /// Position of the next byte in the file.
    pub position: u64,
    fetched: Vec<u8>,
    /// The next byte within `fetched`.
    next: usize,
}

impl<'a, S: ReadAt> Cursor<'a, S> {
    pub fn new(source: &'a S) -> Result<Self, Error> {
        Ok(Self { source, size: source.size()?, position: 0, fetched: Vec::new(), next: 0 })
    }

    /// Checks that `count` items of at least `bytes` bytes each can follow. Callers check before they allocate memory for the
    /// items.
    pub fn expect(&self, count: u64, bytes: u64, what: &dyn Fn() -> String) -> Result<(), Error> {
        let end = count.saturating_mul(bytes).saturating_add(self.position);
        if end > self.size {
            return Err(Error::Truncated { what: what(), end, size: self.size });
        }
        if end > MAX_HEADER {
            let what = format!("bytes of the header up to the end of {}", what());
            return Err(Error::Limit { what, found: end, most: MAX_HEADER });
        }
        Ok(())
    }

    /// Appends the next `count` bytes to `target`.
    pub fn append(
        &mut self,
        count: u64,
        target: &mut Vec<u8>,
        what: &dyn Fn() -> String,
    ) -> Result<(), Error> {
        self.expect(count, 1, what)?;
        let mut missing = count;
        while missing > 0 {
            if self.next == self.fetched.len() {
                self.fetch()?;
            }
            let rest = self.fetched.get(self.next..).unwrap_or_default();
            let taken = rest.len().min(usize::try_from(missing).unwrap_or(usize::MAX));
            target.extend_from_slice(&rest[..taken]);
            self.advance(taken);
            missing -= taken as u64;
        }
        Ok(())
    }

    /// The next `N` bytes.
    pub fn take<const N: usize>(&mut self, what: &dyn Fn() -> String) -> Result<[u8; N], Error> {
        if let Some(bytes) = self.fetched.get(self.next..).and_then(|rest| rest.first_chunk()) {
            let bytes = *bytes;
            self.advance(N);
            return Ok(bytes);
        }
        let mut bytes = Vec::with_capacity(N);
        self.append(N as u64, &mut bytes, what)?;
        bytes.first_chunk().copied().ok_or_else(|| Error::damaged(what(), "it ends too early"))
    }

    /// The next four bytes as a number.
    pub fn u32(&mut self, what: &dyn Fn() -> String) -> Result<u32, Error> {
        self.take(what).map(u32::from_le_bytes)
    }

    /// The next eight bytes as a number.
    pub fn u64(&mut self, what: &dyn Fn() -> String) -> Result<u64, Error> {
        self.take(what).map(u64::from_le_bytes)
    }

    /// A name: its length, then as many bytes of UTF-8, at least one and at most `most`.
    pub fn name(&mut self, most: u64, what: &dyn Fn() -> String) -> Result<String, Error> {
        let length = self.u64(what)?;
        if length > most {
            let what = format!("bytes of {}", what());
            return Err(Error::Limit { what, found: length, most });
        }
        let mut bytes = Vec::new();
        self.append(length, &mut bytes, what)?;
        if bytes.is_empty() {
            return Err(Error::damaged(what(), "it is empty"));
        }
        String::from_utf8(bytes)
            .map_err(|error| Error::damaged(what(), format!("it is not UTF-8: {}", error.utf8_error())))
    }

    fn advance(&mut self, bytes: usize) {
        self.next += bytes;
        self.position += bytes as u64;
    }

    /// Fetches the bytes that follow. The caller has checked that there is at least one.
    fn fetch(&mut self) -> Result<(), Error> {
        let bytes = FETCH.min(self.size - self.position);
        self.fetched.resize(usize::try_from(bytes).unwrap_or(usize::MAX), 0);
        self.next = 0;
        self.source.read_at(self.position, &mut self.fetched)?;
        Ok(())
    }
}
