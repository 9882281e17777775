//! Starts and ends claimed pages: most pages that need no data end here, the other pages become runs.

use std::io;
use std::sync::Arc;

use host_plugin_api::ErrorCode;
use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{Level, log};

use crate::format::{BLOCK, Value, checksum, padded};
use crate::memory::Buffer;
use crate::queue::{CLAIM_BYTES, Claimed, Ended, Kind};
use crate::run::{Run, RunPage, RunPlace};
use crate::segment::Segment;
use crate::store::{Store, code_of, is_of_this_process};
use crate::writer::{NoSpace, Space};

/// Starts the pages of a claim. Pages that end at once go to `ended`, pages that have to wait are parked.
pub fn start(store: &Store, claim: &[Claimed], ended: &mut Vec<Ended>, runs: &mut Vec<Run>) {
    match claim.first().map(|page| page.kind) {
        Some(Kind::Put) => start_puts(store, claim, ended, runs),
        Some(Kind::Get) => start_gets(store, claim, ended, runs),
        _ => claim.iter().for_each(|page| look_up(store, page, ended)),
    }
}

fn look_up(store: &Store, page: &Claimed, ended: &mut Vec<Ended>) {
    if page.kind == Kind::Delete && store.directory.read_only {
        return ended.push(page.failed(ErrorCode::UNSUPPORTED));
    }
    // A segment that is not loaded yet may have a copy.
    if page.kind == Kind::Delete && !store.index.lock().complete {
        return store.queue.park(page);
    }
    match store.find(&page.what.key) {
        (None, true) => store.queue.park(page),
        (None, false) => {
            if page.kind == Kind::Exists {
                store.metrics.misses.add(1);
            }
            ended.push(page.ended(MISSING, 0));
        }
        (Some(hit), _) => {
            let bytes = u64::from(hit.value.length);
            if page.kind == Kind::Exists {
                return ended.push(page.ended(FOUND, bytes));
            }
            match store.delete(&page.what.key) {
                Ok(()) => {
                    store.metrics.deleted.add(1);
                    ended.push(page.ended(FOUND, bytes));
                }
                Err(e) => {
                    let path = store.directory.path().display();
                    log!(Level::WARN, "a page in {path} cannot be deleted for good: {e}");
                    ended.push(page.failed(ErrorCode::IO));
                }
            }
        }
    }
}

/// A buffer for memory that is not aligned. `Err` when there is no memory.
fn buffer_for(page: &Claimed) -> Result<Option<Buffer>, ()> {
    match page.span {
        Some(span) if span.is_aligned() => Ok(None),
        _ => Buffer::new(page.what.length as usize).map(Some).ok_or(()),
    }
}

fn start_gets(store: &Store, claim: &[Claimed], ended: &mut Vec<Ended>, runs: &mut Vec<Run>) {
    let mut run: Option<(Arc<Segment>, Vec<RunPage>)> = None;
    let mut flush = |run: Option<(Arc<Segment>, Vec<RunPage>)>, ended: &mut Vec<Ended>| {
        let Some((segment, parts)) = run else { return };
        match store.files.get(&store.directory, &segment) {
            Ok(file) => runs.push(Run::new(RunPlace::From(segment), file, parts)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                store.forget(&segment);
                store.metrics.misses.add(parts.len() as u64);
                ended.extend(parts.iter().map(|part| part.page.ended(MISSING, 0)));
            }
            Err(e) => failed_read(store, &e, &segment, &parts, ended),
        }
    };
    for page in claim {
        let hit = match store.find(&page.what.key) {
            (Some(hit), _) => hit,
            (None, true) => {
                store.queue.park(page);
                continue;
            }
            (None, false) => {
                store.metrics.misses.add(1);
                ended.push(page.ended(MISSING, 0));
                continue;
            }
        };
        if hit.value.length != page.what.length {
            ended.push(page.failed(ErrorCode::INVALID_ARGUMENT));
            continue;
        }
        let Ok(buffer) = buffer_for(page) else {
            ended.push(page.failed(ErrorCode::NO_RESOURCE));
            continue;
        };
        let part =
            RunPage { page: *page, value: hit.value, number: hit.number, is_suspect: hit.is_suspect, buffer };
        let behind = run.as_ref().is_some_and(|(segment, parts)| {
            let end = parts.last().map(|part| part.value.end());
            segment.id == hit.segment.id && end == Some(hit.value.start())
        });
        if !behind {
            flush(run.take(), ended);
        }
        run.get_or_insert_with(|| (hit.segment, Vec::new())).1.push(part);
    }
    flush(run, ended);
}

/// Ends pages that could not be read. The next put of each writes it again, unless the error says nothing about the file.
fn failed_read(
    store: &Store,
    error: &io::Error,
    segment: &Segment,
    parts: &[RunPage],
    ended: &mut Vec<Ended>,
) {
    if !is_of_this_process(error) {
        let mut index = store.index.lock();
        parts.iter().for_each(|part| index.suspect(&part.value.key, segment.id, part.number));
    }
    let path = store.directory.path().display();
    log!(Level::WARN, "{} pages in {path} cannot be read: {error}", parts.len());
    store.metrics.read_errors.add(parts.len() as u64);
    ended.extend(parts.iter().map(|part| part.page.failed(ErrorCode::IO)));
}

fn refuse(store: &Store, page: &Claimed, code: ErrorCode, ended: &mut Vec<Ended>) {
    store.metrics.refused(code);
    ended.push(page.failed(code));
}

fn start_puts(store: &Store, claim: &[Claimed], ended: &mut Vec<Ended>, runs: &mut Vec<Run>) {
    let bytes_of = |page: &Claimed| padded(page.what.length.into());
    let mut fresh = Vec::with_capacity(claim.len());
    for page in claim {
        if store.directory.read_only {
            refuse(store, page, ErrorCode::UNSUPPORTED, ended);
        } else if let (Some(hit), _) = store.find(&page.what.key)
            && !hit.is_suspect
        {
            store.metrics.stored_already.add(1);
            hit.segment.used();
            ended.push(page.ended(STORED, hit.value.length.into()));
        } else {
            fresh.push(page);
        }
    }
    let most = CLAIM_BYTES.min(store.config.segment());
    let mut rest = fresh.as_slice();
    while let Some(first) = rest.first() {
        let (mut count, mut bytes) = (1, bytes_of(first));
        while let Some(next) = rest.get(count)
            && bytes + bytes_of(next) <= most
        {
            bytes += bytes_of(next);
            count += 1;
        }
        let (pages, behind) = rest.split_at(count);
        rest = behind;
        let (space, call) = store.writer.space(bytes);
        if call {
            store.call_keeper();
        }
        match space {
            Ok(space) => runs.extend(write_run(store, space, pages, ended)),
            Err(NoSpace::Wait) => pages.iter().for_each(|page| store.queue.park(page)),
            Err(NoSpace::Refused(code)) => pages.iter().for_each(|page| refuse(store, page, code, ended)),
        }
    }
}

/// The run that writes these pages into their space.
fn write_run(store: &Store, space: Space, pages: &[&Claimed], ended: &mut Vec<Ended>) -> Option<Run> {
    let mut block = space.block;
    let mut parts = Vec::with_capacity(pages.len());
    for page in pages {
        let (Some(span), Ok(mut buffer)) = (page.span, buffer_for(page)) else {
            refuse(store, page, ErrorCode::NO_RESOURCE, ended);
            continue;
        };
        if let Some(buffer) = &mut buffer {
            span.copy_to(buffer);
        }
        let (key, length) = (page.what.key, page.what.length);
        let value = Value { key, checksum: span.checksum(&key), block, length };
        block += (padded(length.into()) / BLOCK) as u32;
        parts.push(RunPage { page: **page, value, number: 0, is_suspect: false, buffer });
    }
    if parts.is_empty() {
        space.open.ended();
        return None;
    }
    let data = space.open.data.clone();
    Some(Run::new(RunPlace::To(space.open), data, parts))
}

/// Ends the pages of a run, which ended with an error or with `run.done` bytes.
pub fn finish(store: &Store, run: Run, result: io::Result<()>, ended: &mut Vec<Ended>) {
    if run.is_read() {
        finish_read(store, run, result, ended)
    } else {
        finish_write(store, run, result, ended)
    }
}

fn finish_read(store: &Store, run: Run, result: io::Result<()>, ended: &mut Vec<Ended>) {
    let RunPlace::From(segment) = &run.place else { return };
    segment.used();
    let (mut end, mut hits, mut bytes) = (0, 0, 0);
    let mut unread = Vec::new();
    for part in run.parts {
        end += padded(part.value.length.into()) as usize;
        let (Value { key, length, .. }, page) = (part.value, part.page);
        let Some(span) = page.span else { continue };
        if end > run.done {
            unread.push(part);
            continue;
        }
        let found = match &part.buffer {
            Some(buffer) => checksum(&key, &buffer.bytes()[..length as usize]),
            None => span.checksum(&key),
        };
        if found != part.value.checksum {
            store.corrupt(&key, segment, part.number);
            ended.push(page.failed(ErrorCode::IO));
            continue;
        }
        if part.is_suspect {
            store.index.lock().trust(segment.id, part.number);
        }
        if let Some(buffer) = &part.buffer {
            span.copy_from(buffer);
        }
        (hits, bytes) = (hits + 1, bytes + u64::from(length));
        ended.push(page.ended(FOUND, length.into()));
    }
    store.metrics.hits.add(hits);
    store.metrics.bytes_read.add(bytes);
    match result {
        Err(e) => failed_read(store, &e, segment, &unread, ended),
        // The file is shorter than the record promised.
        Ok(()) => {
            for part in unread {
                store.corrupt(&part.value.key, segment, part.number);
                ended.push(part.page.failed(ErrorCode::IO));
            }
        }
    }
}

fn finish_write(store: &Store, run: Run, result: io::Result<()>, ended: &mut Vec<Ended>) {
    let RunPlace::To(open) = &run.place else { return };
    let values: Vec<Value> = run.parts.iter().map(|part| part.value).collect();
    match result.and_then(|()| open.publish(&values, store.config.fsync)) {
        Ok(first) => {
            let mut index = store.index.lock();
            let mut bytes = 0;
            for (number, value) in (first..).zip(&values) {
                index.insert(open.segment.id, number, *value);
                bytes += u64::from(value.length);
            }
            drop(index);
            store.metrics.stored.add(values.len() as u64);
            store.metrics.bytes_written.add(bytes);
            ended.extend(run.parts.iter().map(|part| part.page.ended(STORED, part.value.length.into())));
        }
        Err(e) => {
            // The next put gets another segment, and the keeper looks at the free space again.
            store.writer.give_up(open.segment.id);
            let path = store.directory.path().display();
            log!(Level::WARN, "{} pages cannot be stored in {path}: {e}", values.len());
            for part in &run.parts {
                refuse(store, &part.page, code_of(&e), ended);
            }
        }
    }
    open.ended();
}

/// The loop of a thread that carries runs out itself.
pub fn thread(store: &Store) {
    let (mut claim, mut ended, mut runs) = (Vec::new(), Vec::new(), Vec::new());
    while store.queue.wait_claim(&mut claim) {
        start(store, &claim, &mut ended, &mut runs);
        store.queue.finish(&ended);
        ended.clear();
        for mut run in runs.drain(..) {
            let result = run.execute();
            finish(store, run, result, &mut ended);
            store.queue.finish(&ended);
            ended.clear();
        }
    }
}
