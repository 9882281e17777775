//! Writes down everything that a plugin and a host must agree on.

use std::collections::BTreeMap;
use std::fmt::Write;

use abi_stable::StableAbi;
use abi_stable::type_layout::{TLData, TLDataDiscriminant, TLField, TLFunction, TLPrimitive, TypeLayout};
use host_plugin_api::abi::PluginRoot_Ref;
use host_plugin_api::{
    ErrorCode, LayerKind, MemoryKind, NOTIFICATION_BYTES, NotificationKind, Retains, VERSION, capability,
    note, tier,
};

const HEAD: &str = "\
# What crosses between host and plugins. Written by a test, do not edit:
# HOST_ABI_LOCK=write cargo test -p host-plugin-api --test abi_lock
";

/// The whole ABI as text. The same ABI always gives the same text.
pub fn abi() -> String {
    let mut types = BTreeMap::new();
    collect(<PluginRoot_Ref as StableAbi>::LAYOUT, &mut types);
    let mut text = format!("{HEAD}api {VERSION}\n\n");
    constants(&mut text).unwrap();
    for (name, layout) in types {
        writeln!(text).unwrap();
        describe(&mut text, &name, layout).unwrap();
    }
    text
}

fn constants(text: &mut String) -> std::fmt::Result {
    let owner = String::from_utf8_lossy(note::NAME);
    writeln!(
        text,
        "note section {}, owner {owner}, type {}, header {} bytes, aligned to {}",
        note::SECTION,
        note::TYPE_MANIFEST,
        size_of::<note::Note<0>>(),
        align_of::<note::Note<0>>()
    )?;
    writeln!(text, "symbol {}<crate>", note::SYMBOL_PREFIX)?;
    for name in capability::ALL {
        writeln!(text, "capability {name}")?;
    }
    // Codes are numbered from -1 down without a gap.
    for code in (1..).map(|n| ErrorCode(-n)).take_while(|code| code.name() != "UNKNOWN") {
        writeln!(text, "error {} = {}", code.name(), code.0)?;
    }
    for (name, value) in [
        ("transfer::MemoryKind::DRAM", i64::from(MemoryKind::DRAM.0)),
        ("transfer::MemoryKind::VRAM", i64::from(MemoryKind::VRAM.0)),
        ("transfer::NotificationKind::ARRIVED", i64::from(NotificationKind::ARRIVED.0)),
        ("transfer::NotificationKind::PEER_LOST", i64::from(NotificationKind::PEER_LOST.0)),
        ("transfer::NOTIFICATION_BYTES", NOTIFICATION_BYTES as i64),
        ("tier::FOUND", i64::from(tier::FOUND)),
        ("tier::STORED", i64::from(tier::STORED)),
        ("tier::MISSING", i64::from(tier::MISSING)),
        ("allocator::LayerKind::FULL", i64::from(LayerKind::FULL.0)),
        ("allocator::LayerKind::WINDOW", i64::from(LayerKind::WINDOW.0)),
        ("allocator::LayerKind::STATE", i64::from(LayerKind::STATE.0)),
        ("allocator::Retains::ALL", i64::from(Retains::ALL.0)),
        ("allocator::Retains::NEWEST", i64::from(Retains::NEWEST.0)),
        ("allocator::Retains::STATE", i64::from(Retains::STATE.0)),
    ] {
        writeln!(text, "constant {name} = {value}")?;
    }
    Ok(())
}

/// How a type is written where it is used: with its type parameters, without lifetimes.
fn name(layout: &TypeLayout) -> String {
    let of = |layouts: &[&TypeLayout]| layouts.iter().map(|l| name(l)).collect::<Vec<_>>().join(", ");
    let parameters: Vec<_> = layout.generics().type_params().iter().map(|parameter| parameter()).collect();
    let fields = fields(layout);
    let marked = || fields.iter().filter(|field| field.layout().name() == "PhantomData");
    match (layout.name(), layout.data()) {
        (_, TLData::Primitive(TLPrimitive::SharedRef)) => format!("&{}", of(&parameters)),
        (_, TLData::Primitive(TLPrimitive::MutRef)) => format!("&mut {}", of(&parameters)),
        (_, TLData::Primitive(TLPrimitive::ConstPtr)) => format!("*const {}", of(&parameters)),
        (_, TLData::Primitive(TLPrimitive::MutPtr)) => format!("*mut {}", of(&parameters)),
        (_, TLData::Primitive(TLPrimitive::Array)) => {
            let each = parameters.first().map_or(1, |each| each.size().max(1));
            format!("[{}; {}]", of(&parameters), layout.size() / each)
        }
        // The types below do not list their element type among their parameters.
        ("RSlice" | "RSliceMut" | "RVec" | "RBox", _) => {
            let made_for: Vec<_> =
                marked().flat_map(|field| field.layout().generics().type_params()).collect();
            let made_for =
                made_for.first().map(|parameter| name(parameter()).replace('&', "").replace("mut ", ""));
            format!("{}<{}>", layout.name(), made_for.unwrap_or_default())
        }
        ("MutWorkaround", _) => fields.first().map(|field| name(field.layout())).unwrap_or_default(),
        ("ROption" | "RResult", _) => {
            format!("{}<{}>", layout.name(), of(&fields.iter().map(TLField::layout).collect::<Vec<_>>()))
        }
        ("RObject", _) => {
            let made_for =
                marked().flat_map(|field| field.function_range()).filter_map(|f| f.return_type_layout());
            let made_for: Vec<_> = made_for.map(|layout| layout()).collect();
            format!("RObject<{}>", of(&made_for))
        }
        ("RObjectVtable", _) => {
            let made_for = marked().flat_map(|field| field.layout().generics().type_params().last()).next();
            format!("RObjectVtable<{}>", made_for.map(|layout| name(layout())).unwrap_or_default())
        }
        ("VTable", _) => {
            let path = layout.mod_path().to_string();
            format!("VTable<{}>", path.rsplit("::").next().unwrap_or_default())
        }
        (plain, _) if parameters.is_empty() => plain.to_owned(),
        (generic, _) => format!("{generic}<{}>", of(&parameters)),
    }
}

fn signature(function: &TLFunction) -> String {
    // The names are separated, and ended, by commas.
    let mut names = function.param_names.as_str().split([',', ';']).filter(|name| !name.is_empty());
    let parameters: Vec<_> = function
        .param_type_layouts
        .iter()
        .map(|layout| format!("{}: {}", names.next().unwrap_or("_"), name(layout())))
        .collect();
    let returned = function.return_type_layout().map(|layout| format!(" -> {}", name(layout())));
    let kind = if function.fn_qualifs.is_unsafe() { "unsafe fn" } else { "fn" };
    format!("{kind}({}){}", parameters.join(", "), returned.unwrap_or_default())
}

fn fields(layout: &TypeLayout) -> Vec<TLField> {
    layout.get_fields().map(|fields| fields.to_vec()).unwrap_or_default()
}

/// Adds a type and all types that it refers to.
fn collect(layout: &'static TypeLayout, types: &mut BTreeMap<String, &'static TypeLayout>) {
    if layout.data_discriminant() == TLDataDiscriminant::Primitive {
        return visit_parameters(layout, types);
    }
    if layout.name() == "PhantomData" {
        return visit_parameters(layout, types);
    }
    if let Some(same) = types.insert(name(layout), layout) {
        assert_eq!(same.size(), layout.size(), "two types are called {}", name(layout));
        return;
    }
    visit_parameters(layout, types);
    let phantom = layout.phantom_fields().to_vec();
    for field in fields(layout).into_iter().chain(phantom) {
        if layout.name() == "MutWorkaround" {
            types.remove(&name(layout));
        }
        collect(field.layout(), types);
        for function in field.function_range() {
            for parameter in function.param_type_layouts.iter().chain(function.return_type_layout()) {
                collect(parameter(), types);
            }
        }
    }
}

fn visit_parameters(layout: &'static TypeLayout, types: &mut BTreeMap<String, &'static TypeLayout>) {
    for parameter in layout.generics().type_params() {
        collect(parameter(), types);
    }
}

fn describe(text: &mut String, name: &str, layout: &'static TypeLayout) -> std::fmt::Result {
    let (size, align) = (layout.size(), layout.alignment());
    match layout.data() {
        TLData::PrefixType(prefix) => {
            // No size: it grows with every appended field, which either side allows.
            writeln!(text, "{name} prefix of {} fields", prefix.first_suffix_field)?;
        }
        TLData::Enum(of) => {
            let variants = of.variant_names_iter().collect::<Vec<_>>().join(", ");
            let repr = format!("{:?}", layout.repr_attr());
            writeln!(
                text,
                "{name} size {size} align {align} enum {repr} {variants}: {:?}",
                of.discriminants
            )?;
        }
        TLData::Primitive(_) | TLData::Opaque | TLData::Struct { .. } | TLData::Union { .. } => {
            let kind = format!("{:?}", layout.data_discriminant()).to_lowercase();
            let repr = format!("{:?}", layout.repr_attr());
            writeln!(text, "{name} size {size} align {align} {kind} {repr}")?;
        }
    }
    let offsets = offsets(layout);
    for (number, field) in fields(layout).iter().enumerate() {
        write!(text, "  {number}: {}", field.name())?;
        if !field.is_function() {
            write!(text, ": {}", self::name(field.layout()))?;
        }
        for function in field.function_range() {
            write!(text, " {}", signature(&function))?;
        }
        if let Some(offset) = offsets.get(number) {
            write!(text, " at {offset}")?;
        }
        writeln!(text)?;
    }
    Ok(())
}

/// Offsets of a struct's fields, as `repr(C)` lays them out. Empty when the computed size is not the real size, as with
/// `abi_stable`'s own references.
fn offsets(layout: &'static TypeLayout) -> Vec<usize> {
    if !matches!(layout.data(), TLData::Struct { .. }) {
        return Vec::new();
    }
    let (mut end, mut offsets) = (0_usize, Vec::new());
    for field in fields(layout) {
        let of = field.layout();
        let (size, align) = if field.is_function() { (8, 8) } else { (of.size(), of.alignment()) };
        end = end.next_multiple_of(align);
        offsets.push(end);
        end += size;
    }
    if end.next_multiple_of(layout.alignment()) == layout.size() { offsets } else { Vec::new() }
}
