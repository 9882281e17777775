//! Reads the notes of a segment, also in files whose compiler aligns notes differently from the format.

use object::Endianness;
use object::elf::FileHeader64;
use object::read::Result;
use object::read::elf::{Note, NoteIterator};

/// Length of a note's header, in bytes.
const HEADER: usize = 12;

/// An iterator over the notes.
pub(super) struct Notes<'a> {
    endian: Endianness,
    /// Alignment of the parts of a note, in bytes: 8 if the segment says so, else 4.
    alignment: usize,
    /// Whether zeros between notes are skipped. A note is a variable of the plugin, and AddressSanitizer aligns variables to 32
    /// bytes or more and pads them with zeros. Segments with the alignments of the format have no such zeros.
    skips_zeros: bool,
    left: &'a [u8],
}

impl<'a> Notes<'a> {
    /// Reads the notes in the bytes of a segment with this alignment.
    pub(super) fn new(endian: Endianness, segment_alignment: u64, bytes: &'a [u8]) -> Self {
        let alignment = if segment_alignment == 8 { 8 } else { 4 };
        Self { endian, alignment, skips_zeros: segment_alignment > 8, left: bytes }
    }

    fn skip_zeros(&mut self) {
        while let Some(([0, 0, 0, 0], left)) = self.left.split_first_chunk() {
            self.left = left;
        }
    }
}

impl<'a> Iterator for Notes<'a> {
    type Item = Result<Note<'a, FileHeader64<Endianness>>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.skips_zeros {
            self.skip_zeros();
        }
        let notes = NoteIterator::new(self.endian, self.alignment as u64, self.left);
        let found = notes.and_then(|mut notes| notes.next()).transpose()?;
        self.left = match &found {
            Err(_) => &[],
            Ok(note) => {
                let description =
                    (HEADER + note.n_namesz(self.endian) as usize).next_multiple_of(self.alignment);
                let end =
                    description + (note.n_descsz(self.endian) as usize).next_multiple_of(self.alignment);
                self.left.get(end..).unwrap_or_default()
            }
        };
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use host_tests::elf::note;

    use super::*;

    fn found(segment_alignment: u64, bytes: &[u8]) -> Vec<Result<(Vec<u8>, Vec<u8>)>> {
        let notes = Notes::new(Endianness::Little, segment_alignment, bytes);
        notes.map(|note| note.map(|note| (note.name().to_vec(), note.desc().to_vec()))).collect()
    }

    #[test]
    fn zeros_that_a_sanitizer_leaves_behind_a_note_are_skipped() {
        let [one, two] = [&b"first"[..], b"second"].map(|text| note(b"HOSTPLUG", 1, text));
        for zeros in 0..16 {
            let mut bytes = one.clone();
            bytes.resize(one.len() + 4 * zeros, 0);
            bytes.extend(&two);
            bytes.resize(bytes.len() + 36, 0);
            let wanted = [b"first".to_vec(), b"second".to_vec()].map(|text| Ok((b"HOSTPLUG".to_vec(), text)));
            for alignment in [32, 64] {
                assert_eq!(found(alignment, &bytes), wanted, "{zeros} words of zeros, alignment {alignment}");
            }
        }
        assert_eq!(found(32, &[0; 100]), []);
    }

    #[test]
    fn a_note_without_a_name_is_none_of_the_zeros() {
        let unnamed = [[0, 0, 0, 0], [4, 0, 0, 0], [7, 0, 0, 0], *b"text"].concat();
        for alignment in [0, 1, 4] {
            assert_eq!(found(alignment, &unnamed), [Ok((vec![], b"text".to_vec()))]);
        }
    }

    #[test]
    fn a_note_that_ends_beyond_its_segment_is_an_error_and_the_last() {
        let bytes = [note(b"HOSTPLUG", 1, b"first"), note(b"HOSTPLUG", 1, b"second")].concat();
        let cut = found(32, &bytes[..bytes.len() - 4]);
        assert_eq!((cut.len(), cut[1].is_err()), (2, true), "{cut:?}");
    }

    #[test]
    fn parts_of_notes_are_aligned_to_eight_bytes_where_the_segment_is() {
        // A note like those of `.note.gnu.property`: its name has 4 bytes, so its description begins at 16.
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let one = words(&[4, 12, 5, u32::from_le_bytes(*b"GNU\0"), 1, 2, 3, 0]);
        let both = [one.clone(), one].concat();
        let wanted = Ok((b"GNU".to_vec(), words(&[1, 2, 3])));
        assert_eq!(found(8, &both), [wanted.clone(), wanted]);
    }
}
