{{- define "epd-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "epd-operator.fullname" -}}
{{- $name := include "epd-operator.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "epd-operator.selector" -}}
app.kubernetes.io/name: {{ include "epd-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "epd-operator.labels" -}}
{{ include "epd-operator.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "epd-operator.adapterName" -}}
{{- printf "%s-metrics-adapter" (include "epd-operator.fullname" . | trunc 47 | trimSuffix "-") }}
{{- end }}

{{- define "epd-operator.adapterSelector" -}}
app.kubernetes.io/name: {{ include "epd-operator.name" . | trunc 47 | trimSuffix "-" }}-metrics-adapter
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "epd-operator.adapterLabels" -}}
{{ include "epd-operator.adapterSelector" . }}
app.kubernetes.io/component: metrics-adapter
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "epd-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "epd-operator.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* An image's full name. Takes a list of the root and one of image.operator, image.engine and image.proxy. */}}
{{- define "epd-operator.image" -}}
{{- $root := index . 0 }}
{{- $image := index . 1 }}
{{- with $root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}
{{- $image.repository }}
{{- if $image.digest -}}
@{{ $image.digest }}
{{- else -}}
:{{ coalesce $image.tag $root.Values.image.tag $root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{- /* The namespaces that are watched, one a line; none stands for all. */}}
{{- define "epd-operator.namespaces" -}}
{{- if eq .Values.scope "namespace" }}
{{- default (list .Release.Namespace) .Values.watchNamespaces | uniq | join "\n" }}
{{- end }}
{{- end }}

{{- /* Security of every container: what the restricted pod security standard asks for, and a read-only root. */}}
{{- define "epd-operator.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "epd-operator.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}
