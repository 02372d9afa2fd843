"""Methods: what clients and the server compute, one file each; and the add-ons and ingredients they are made with.

How a method is run is not here. To add one: write its file, and add its line to the table.
"""

from typing import TYPE_CHECKING

from plures.registry import Registry

if TYPE_CHECKING:
    from plures.methods.addons.base import Addon
    from plures.methods.base import Maker

METHODS: "Registry[Maker]" = Registry(
    "method",
    "plures.methods",
    {
        "local": "plures.methods.local:Local",
        "fedavg": "plures.methods.fedavg:FedAvg",
        "fedprox": "plures.methods.fedprox:fedprox",
        "scaffold": "plures.methods.scaffold:scaffold",
        "feddyn": "plures.methods.feddyn:feddyn",
        "fedsam": "plures.methods.fedsam:fedsam",
        "perfedavg": "plures.methods.perfedavg:PerFedAvg",
        "fedmeta": "plures.methods.fedmeta:FedMeta",
        "fedpermeta": "plures.methods.fedpermeta:FedPerMeta",
        "pfedme": "plures.methods.pfedme:PFedMe",
        "ditto": "plures.methods.ditto:Ditto",
        "fedper": "plures.methods.fedper:fedper",
        "fedrep": "plures.methods.fedrep:FedRep",
        "lgfedavg": "plures.methods.lgfedavg:lgfedavg",
        "fedbn": "plures.methods.fedbn:fedbn",
        "fedamp": "plures.methods.fedamp:FedAMP",
        "fedphp": "plures.methods.fedphp:FedPHP",
        "fedfomo": "plures.methods.fedfomo:FedFomo",
        "apple": "plures.methods.apple:Apple",
        "partialfed": "plures.methods.partialfed:PartialFed",
        "pfedhn": "plures.methods.pfedhn:pfedhn",
        "mtl": "plures.methods.mtl:Mtl",
        "apfl": "plures.methods.apfl:APFL",
        "fedala": "plures.methods.fedala:fedala",
        "fedrod": "plures.methods.fedrod:FedRoD",
        "pfedla": "plures.methods.pfedla:pfedla",
        "heurpfedla": "plures.methods.heurpfedla:heurpfedla",
        "plgu-lf": "plures.methods.plgu_lf:PlguLf",
        "plgu-grep": "plures.methods.plgu_grep:PlguGRep",
        "plgu-ghn": "plures.methods.plgu_ghn:plgu_ghn",
        "afml": "plures.methods.afml:Afml",
    },
)

ADDONS: "Registry[type[Addon]]" = Registry(
    "add-on",
    "plures.addons",
    {
        "ft": "plures.methods.addons.ft:Ft",
        "c": "plures.methods.addons.c:C",
        "ala": "plures.methods.addons.ala:Ala",
        "sam": "plures.methods.addons.sam:Sam",
        "prox": "plures.methods.addons.prox:Prox",
        "scaffold": "plures.methods.addons.scaffold:Scaffold",
        "feddyn": "plures.methods.addons.feddyn:FedDyn",
        "brm": "plures.methods.addons.brm:Brm",
        "fedopt": "plures.methods.addons.fedopt:FedOpt",
        "keep": "plures.methods.addons.keep:Keep",
        "public": "plures.methods.addons.public:Public",
    },
)
