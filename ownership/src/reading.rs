//! Reading files whose length and kind another user may have chosen, such as those of a model that was downloaded.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// Opens a regular file and nothing else: opening a pipe would wait for its writer, and a device may have no end.
///
/// # Errors
/// When it cannot be opened, or is no regular file.
pub fn regular(path: &Path) -> io::Result<(File, Metadata)> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok((file, metadata))
}

/// Reads a regular file of at most so many bytes, also if it grows meanwhile.
///
/// # Errors
/// When it cannot be read, is no regular file, or is longer. Then no more than these bytes were read.
pub fn read_up_to(path: &Path, longest: u64) -> io::Result<Vec<u8>> {
    let (file, metadata) = regular(path)?;
    let mut bytes = Vec::new();
    if metadata.len() <= longest {
        file.take(longest + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 <= longest {
            return Ok(bytes);
        }
    }
    Err(io::Error::other(format!("{} bytes, at most {longest} are read", metadata.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_up_to_the_limit_are_read_and_others_and_no_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "four").unwrap();
        assert_eq!(read_up_to(&path, 4).unwrap(), b"four");
        assert_eq!(read_up_to(&path, 3).unwrap_err().to_string(), "4 bytes, at most 3 are read");
        let none = read_up_to(&folder.path().join("none"), 3).unwrap_err();
        assert_eq!(none.kind(), io::ErrorKind::NotFound);
        // A device without an end, and a pipe without a writer.
        let endless = folder.path().join("endless");
        std::os::unix::fs::symlink("/dev/zero", &endless).unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        for path in [endless, pipe, folder.path().to_owned()] {
            let error = read_up_to(&path, 100).unwrap_err().to_string();
            assert_eq!(error, "it is not a regular file", "{}", path.display());
        }
    }
}
