{{- /* What the operator may do where its resources live; a test runs it with exactly this. */}}
{{- define "epd-operator.rules" -}}
- apiGroups: [epd.dev]
  resources: [epddeployments]
  verbs: [get, list, watch]
- apiGroups: [epd.dev]
  resources: [epddeployments/status]
  verbs: [get, patch]
# Where OwnerReferencesPermissionEnforcement is on, children that name their owner need this.
- apiGroups: [epd.dev]
  resources: [epddeployments/finalizers]
  verbs: [update]
# Its children.
- apiGroups: [apps]
  resources: [deployments]
  verbs: &children [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, persistentvolumeclaims, serviceaccounts]
  verbs: *children
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: *children
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: *children
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: *children
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: *children
# Where KEDA scales a role.
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: *children
# What it reads to say why something does not come up.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
# The proxies find their instances with this. Nobody can hand on what they do not hold.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [get, create, patch]
{{- end }}
