//! A network of namespaces: one for each process, with a link of its own to the bridge that clients use.

use std::net::Ipv4Addr;
use std::process::Command;

use crate::sandbox::run;

/// Percentage of packets that a bad link loses in each direction.
const LOST: u32 = 15;

/// A bridge in the namespaces of this run.
pub struct Network {
    nodes: u8,
    /// Whether nftables is installed, which drops packets.
    drops: bool,
}

/// The network namespace of one process.
#[derive(Clone, Debug)]
pub struct Node {
    number: u8,
    pub address: Ipv4Addr,
}

impl Network {
    pub fn make() -> Result<Self, String> {
        std::fs::create_dir_all("/run/netns").map_err(|error| format!("/run/netns: {error}"))?;
        run("mount -t tmpfs tmpfs /run/netns")?;
        run("ip link add clients type bridge")?;
        run("ip addr add 10.77.0.1/24 dev clients")?;
        run("ip link set clients up")?;
        let drops = Self::drop_packets();
        if let Err(why) = &drops {
            println!("no packets are lost: {why}");
        }
        Ok(Self { nodes: 0, drops: drops.is_ok() })
    }

    /// Adds rules that drop a random part of the packets of all links in the set `bad`, and all packets from one link to another
    /// that the set `parted` has.
    fn drop_packets() -> Result<(), String> {
        run("nft add table bridge chaos")?;
        run("nft add set bridge chaos parted { type ifname . ifname ; }")?;
        run("nft add chain bridge chaos forward { type filter hook forward priority 0 ; }")?;
        run("nft add rule bridge chaos forward iifname . oifname @parted drop")?;
        run("nft add set bridge chaos bad { type ifname ; }")?;
        for (hook, name) in [("prerouting", "iifname"), ("postrouting", "oifname")] {
            run(&format!("nft add chain bridge chaos {hook} {{ type filter hook {hook} priority 0 ; }}"))?;
            let lot = format!("numgen random mod 100 < {LOST} drop");
            run(&format!("nft add rule bridge chaos {hook} {name} @bad {lot}"))?;
        }
        Ok(())
    }

    pub fn drops(&self) -> bool {
        self.drops
    }

    pub fn node(&mut self) -> Node {
        self.nodes += 1;
        let node = Node { number: self.nodes, address: Ipv4Addr::new(10, 77, 0, 10 + self.nodes) };
        let (name, link, address) = (node.name(), node.link(), node.address);
        for command in [
            format!("ip netns add {name}"),
            format!("ip link add {link} type veth peer name eth0 netns {name}"),
            format!("ip link set {link} master clients up"),
            format!("ip -n {name} addr add {address}/24 dev eth0"),
            format!("ip -n {name} link set eth0 up"),
            format!("ip -n {name} link set lo up"),
        ] {
            run(&command).unwrap();
        }
        node
    }
}

impl Node {
    fn name(&self) -> String {
        format!("node{}", self.number)
    }

    fn link(&self) -> String {
        format!("link{}", self.number)
    }

    /// A command that runs a program in this namespace.
    pub fn command(&self, program: &std::path::Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.name())).arg("--").arg(program);
        command
    }

    /// Takes the link down, or up again.
    pub fn cut(&self, cut: bool) {
        let state = if cut { "down" } else { "up" };
        run(&format!("ip link set {} {state}", self.link())).unwrap();
    }

    /// Starts or stops the loss of all packets to another node.
    pub fn part(&self, other: &Self, part: bool) {
        let act = if part { "add" } else { "delete" };
        let (from, to) = (self.link(), other.link());
        run(&format!("nft {act} element bridge chaos parted {{ {from} . {to} }}")).unwrap();
    }

    /// Starts or stops the loss of packets.
    pub fn lose(&self, lose: bool) {
        let act = if lose { "add" } else { "delete" };
        run(&format!("nft {act} element bridge chaos bad {{ {} }}", self.link())).unwrap();
    }
}
