//! The report at the end of the run.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cast::Cast;
use crate::disk::Done;
use crate::load::Tally;

/// Prints the report. True when nothing was wrong, lost or leaked.
pub fn print(
    cast: &Cast,
    injected: &BTreeMap<&'static str, u32>,
    tally: &Tally,
    leaks: &[String],
    lasted: Duration,
) -> bool {
    println!("\n| Fault | Injected | Answers meanwhile, equal | Of them asked again | Wrong | Lost |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    for (fault, count) in injected {
        let during = tally.during.get(fault).copied().unwrap_or_default();
        let (right, again) = (during.right, during.reconnected);
        println!("| {fault} | {count} | {right} | {again} | {} | {} |", during.wrong, during.lost);
    }
    let (wrong, lost) = (tally.wrong.len(), tally.lost.len());
    let all = injected.values().sum::<u32>();
    println!(
        "| all, in {:.0} s | {all} | {} | {} | {wrong} | {lost} |",
        lasted.as_secs_f64(),
        tally.right,
        tally.reconnected
    );
    println!("\n| Kind of request | Answers, equal |\n| --- | ---: |");
    for (kind, count) in &tally.kinds {
        println!("| {kind} | {count} |");
    }
    println!("\nrequests left by their client, with an equal beginning: {}", tally.left);
    println!("answers that went on on another worker, by the routers that live: {}", cast.resumed());
    for (why, count) in cast.ended() {
        println!("processes that ended because they {why}: {count}");
    }
    if let Some(Done { late, failed }) = cast.disk.done() {
        println!(
            "reads, writes and syncs of the tier's file system that were late: {late}, that failed: {failed}"
        );
    }
    println!("processes that ended unasked: {}", cast.unasked().len());
    println!("leaks: {}", leaks.len());
    let mut troubles = Vec::new();
    let unasked = cast.unasked().as_slice();
    for (what, found) in
        [("wrong", &tally.wrong[..]), ("lost", &tally.lost), ("ended unasked", unasked), ("leak", leaks)]
    {
        troubles.extend(found.iter().take(10).map(|one| format!("{what}: {one}")));
    }
    println!("{}", if troubles.is_empty() { "OK".to_owned() } else { format!("\n{}", troubles.join("\n")) });
    troubles.is_empty()
}
